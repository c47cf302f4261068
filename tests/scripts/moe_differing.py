"""What ranks of mixture of experts are told when they differ, or one raises, stops or dies."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from moe_cases import EXPERTS, WIDTH, batch_of, experts_of, gate_of, layer_of
from raised import raised
from torch import Tensor, nn

from bytesched.errors import BytesschedError
from bytesched.plugins import moe
from bytesched.plugins.exchanges.peers import peers_of
from bytesched.urgency import URGENCY


class Half(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.bfloat16()


class Narrow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, 1:]


def own_expert(last: nn.Module) -> moe.MoE:
    """A layer of an expert a rank, which copies; ``last`` is that of the last rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    return moe.MoE(moe.TopKGate(WIDTH, size), [last if rank == size - 1 else nn.Identity()])


def layer_for(experts: int) -> moe.MoE:
    """A layer of experts that copy."""
    return moe.MoE(moe.TopKGate(WIDTH, experts), [nn.Identity() for _ in moe.own_experts(experts)])


def told(call: Callable[[], Any]) -> str:
    return raised(call) or "no error"


def experts_of_another_width() -> list[str]:
    """What ranks are told of an expert of the last one, and whether a good layer goes on."""
    x = torch.randn(9, WIDTH)
    return [told(partial(own_expert(last), x)) for last in (Narrow(), nn.Identity())]


def another_dtype_of_one_rank() -> bool:
    """Whether results of an expert in 16 bits arrive as such, in the tokens' dtype."""
    layer = own_expert(Half())
    torch.manual_seed(dist.get_rank())
    x = torch.randn(9, WIDTH)
    y = layer(x)
    routing = layer.gate(x)
    made = torch.where(routing.keep[:, -1:], x.bfloat16().float(), x)
    return y.dtype is x.dtype and torch.equal(y, made * routing.weight.sum(dim=1, keepdim=True))


def layers_in_another_order() -> list[str]:
    """What ranks are told where the last one is in another layer than the others, or skips it."""
    size = dist.get_world_size()
    is_last = dist.get_rank() == size - 1
    few, many, same = map(layer_for, (2 * size, 8 * size, 8 * size))
    x = torch.randn(9, WIDTH)
    nothing = [0] * size
    found = [
        told(lambda: (few if is_last else many)(x)),
        told(lambda: (same if is_last else many)(x)),
        told(lambda: moe.exchange(x[:0], nothing, nothing) if is_last else few(x)),
    ]
    names = {few.number: "few", many.number: "many", same.number: "same"}
    for number, name in names.items():
        found = [line.replace(f"layer {number}", name) for line in found]
    return [
        *found,
        told(lambda: layer_for(4 * size if is_last else 2 * size)),
        told(lambda: many(x)),
    ]


def infers() -> bool:
    """Whether rows arrive in inference mode, also those that another thread begins to send."""
    rank, size = dist.get_rank(), dist.get_world_size()
    peers = peers_of(None)
    assert peers is not None
    with torch.inference_mode():
        x = torch.full((size, 1 << 20), float(rank))
        once = [1] * size
        # Each is more than the credit, so that the next one waits for its end.
        begun = [peers.start(x, once, once, "x", is_urgent=False) for _ in range(3)]
        arrived = [transfer.wait()[:, 0].tolist() for transfer in begun]
    return arrived == [list(map(float, range(size)))] * 3


def frozen_on_one_rank() -> tuple[bool, str]:
    """Whether trained experts get the same gradients beside frozen ones; and of no gradients."""
    rank = dist.get_rank()
    found = []
    for is_frozen in (False, True):
        layer = layer_of(gate_of("top2"), own=True)
        layer.gate.requires_grad_(False)
        if is_frozen and rank == 0:
            layer.experts.requires_grad_(False)
        (layer(batch_of(rank)) ** 2).sum().backward()
        found.append([p.grad for p in layer.experts.parameters()])
    equal = rank == 0 or all(
        one is not None and other is not None and torch.equal(one, other)
        for one, other in zip(*found, strict=True)
    )
    layer = layer_of(gate_of("top2"), own=True)
    with torch.set_grad_enabled(rank == 0):
        return equal, told(lambda: layer(batch_of(rank)))


class Wide(moe.TopKGate):
    def forward(self, x: Tensor) -> Any:
        routing = super().forward(x)
        return routing._replace(weight=routing.weight.float())


def a_router_in_32_bits() -> bool:
    """Whether tokens keep their 16 bits."""
    layer = layer_of(Wide(WIDTH, EXPERTS).bfloat16(), own=True).bfloat16()
    return bool(layer(batch_of(0).bfloat16()).dtype is torch.bfloat16)


def copied_and_compiled() -> tuple[bool, bool]:
    """Whether a copy after a step computes the same, over the same ranks; and compiled code."""
    layer = layer_of(gate_of("top2"), own=True)
    x = batch_of(dist.get_rank())
    layer(x).sum().backward()
    copied = copy.deepcopy(layer)
    expected = layer(x)
    compiled = torch.compile(layer, backend="eager")
    return torch.equal(copied(x), expected), torch.equal(compiled(x), expected)


def bad_arguments() -> list[str]:
    """What is wrong with numbers that make no pieces."""
    gate = moe.TopKGate(WIDTH, EXPERTS)
    own = [nn.Identity() for _ in moe.own_experts(EXPERTS)]
    return [
        told(lambda: moe.MoE(gate, own, most_pieces=0)),
        told(lambda: moe.MoE(gate, own, piece_bytes=0)),
    ]


class Raising(nn.Module):
    """An expert with an error of its user's."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def forward(self, _: Tensor) -> Tensor:
        raise self.error


class RaisingGate(moe.TopKGate):
    error: BaseException

    def forward(self, _: Tensor) -> Any:
        raise self.error


def outcome(call: Callable[[], Any], own: BaseException) -> str:
    """What ``call`` raises: an error of ours, or ``own`` itself."""
    try:
        call()
    except BytesschedError as error:
        return f"{type(error).__name__}: {error}"
    except BaseException as error:  # noqa: BLE001 - an interrupt is one of the cases
        return "its own" if error is own else repr(error)
    return "no error"


def layer_that_raises(
    kind: str, error: BaseException, *, is_failing: bool, group: Any = None
) -> moe.MoE:
    """A layer in four pieces, of two experts on each of four ranks or four on each of two."""
    experts = experts_of(moe.own_experts(EXPERTS, group))
    gate = gate_of("top2")
    if is_failing and kind == "gate":
        gate = RaisingGate(WIDTH, EXPERTS, 2)
        gate.error = error
    elif is_failing:
        experts[0 if kind == "first expert" else -1] = Raising(error)
    return moe.MoE(gate, experts, group, piece_bytes=16)


def raises_on_one_rank(kind: str, error_type: type[BaseException]) -> list[object]:
    """What a rank is told where the last one raises, and whether a good layer goes on."""
    error = error_type("the weather")
    is_failing = dist.get_rank() == dist.get_world_size() - 1
    bad = layer_that_raises(kind, error, is_failing=is_failing)
    good = layer_that_raises(kind, error, is_failing=False)
    x = torch.randn(64, WIDTH, dtype=torch.float64)
    found: list[object] = [outcome(partial(layer, x), error) for layer in (bad, good)]
    # No exchange of the failed layer holds gradients any more.
    return [*found, len(URGENCY._sections)]


def raises_in_one_row() -> list[str]:
    """The same for one row of a grid: the other goes on."""
    error = ValueError("the weather")
    grid = moe.expert_groups(dist.get_world_size() // 2)
    is_failing = dist.get_rank() == dist.get_world_size() - 1
    layer = layer_that_raises(
        "last expert", error, is_failing=is_failing, group=grid.expert_parallel
    )
    x = torch.randn(64, WIDTH, dtype=torch.float64)
    return [outcome(partial(layer, x), error)]


def fails_before_it_reduces(number: int) -> None:
    """The last rank stops, or dies, where its gradients of experts are to be summed with rank 1's.

    The rank that waits for one that is stopped ends it at last.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    pids: list[Any] = [None] * size
    dist.all_gather_object(pids, os.getpid())
    grid = moe.expert_groups(size // 2)
    experts = experts_of(moe.own_experts(EXPERTS, grid.expert_parallel))
    layer = moe.MoE(gate_of("top2"), experts, grid.expert_parallel, grid.data_parallel)
    layer(torch.randn(16, WIDTH, dtype=torch.float64)).sum().backward()
    moe.reduce_expert_gradients(layer)
    if rank == size - 1:
        os.kill(os.getpid(), number)
    own = RuntimeError()
    print(outcome(lambda: moe.reduce_expert_gradients(layer), own), flush=True)
    if number == signal.SIGSTOP and rank == size // 2 - 1:
        os.kill(pids[-1], signal.SIGKILL)
    # The others' connections last as long as this process.
    os._exit(0)
