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
from raised import told
from rank_worker import signals
from torch import Tensor, nn

from bytesched.errors import BytesschedError
from bytesched.plugins import moe
from bytesched.plugins.exchanges.peers import peers_of
from bytesched.urgency import URGENCY


class Expert(nn.Module):
    """Without parameters."""

    def __init__(self, run: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


def own_expert(last: nn.Module) -> moe.MoE:
    """A layer of an expert a rank, which copies; ``last`` is that of the last rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    return moe.MoE(moe.TopKGate(WIDTH, size), [last if rank == size - 1 else nn.Identity()])


def layer_for(experts: int, **sizes: Any) -> moe.MoE:
    own = [nn.Identity() for _ in moe.own_experts(experts)]
    return moe.MoE(moe.TopKGate(WIDTH, experts), own, **sizes)


def experts_of_another_width() -> list[str]:
    """What ranks are told of an expert of the last one, and whether a good layer goes on."""
    x = torch.randn(9, WIDTH)
    return [
        told(partial(own_expert(last), x)) for last in (Expert(lambda x: x[:, 1:]), nn.Identity())
    ]


def another_dtype_of_one_rank() -> list[str]:
    """Results of an expert in 16 bits arrive as such, in the tokens' dtype."""
    layer = own_expert(Expert(Tensor.bfloat16))
    torch.manual_seed(dist.get_rank())
    x = torch.randn(9, WIDTH)
    y = layer(x)
    routing = layer.gate(x)
    made = torch.where(routing.keep[:, -1:], x.bfloat16().float(), x)
    expected = made * routing.weight.sum(dim=1, keepdim=True)
    return [] if y.dtype is x.dtype and torch.equal(y, expected) else [str(y)]


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


def infers() -> list[str]:
    rank, size = dist.get_rank(), dist.get_world_size()
    peers = peers_of(None)
    assert peers is not None
    with torch.inference_mode():
        x = torch.full((size, 1 << 20), float(rank))
        once = [1] * size
        # Each is more than the credit, so that the next one waits for its end.
        begun = [peers.start(x, once, once, "x", is_urgent=False) for _ in range(3)]
        arrived = [transfer.wait()[:, 0].tolist() for transfer in begun]
    return [] if arrived == [list(map(float, range(size)))] * 3 else [str(arrived)]


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


def a_router_in_32_bits() -> list[str]:
    layer = layer_of(Wide(WIDTH, EXPERTS).bfloat16(), own=True).bfloat16()
    dtype = layer(batch_of(0).bfloat16()).dtype
    return [] if dtype is torch.bfloat16 else [str(dtype)]


def copied_and_compiled() -> list[str]:
    """Which of a copy after a step and compiled code does not compute the same."""
    layer = layer_of(gate_of("top2"), own=True)
    x = batch_of(dist.get_rank())
    layer(x).sum().backward()
    others: dict[str, Any] = {
        "copied": copy.deepcopy(layer),
        "compiled": torch.compile(layer, backend="eager"),
    }
    expected = layer(x)
    return [name for name, other in others.items() if not torch.equal(other(x), expected)]


def bad_arguments() -> list[str]:
    """What is wrong with numbers that make no pieces."""
    wrong: list[dict[str, int]] = [{"most_pieces": 0}, {"piece_bytes": 0}]
    return [told(partial(layer_for, EXPERTS, **sizes)) for sizes in wrong]


def outcome(call: Callable[[], Any], own: BaseException) -> str:
    """What ``call`` raises: an error of ours, or ``own`` itself."""
    try:
        return told(call)
    except BaseException as error:  # noqa: BLE001 - an interrupt is one of the cases
        return "its own" if error is own else repr(error)


def layer_that_raises(
    kind: str, error: BaseException, *, is_failing: bool, group: Any = None
) -> moe.MoE:
    """A layer in four pieces, of two experts on each of four ranks or four on each of two."""

    def fail(*_: object) -> None:
        raise error

    experts = experts_of(moe.own_experts(EXPERTS, group))
    gate = gate_of("top2")
    if is_failing:
        failing = {"gate": gate, "first expert": experts[0], "last expert": experts[-1]}[kind]
        failing.register_forward_pre_hook(fail)
    return moe.MoE(gate, experts, group, piece_bytes=16)


def raises_on_one_rank(kind: str, error_type: type[BaseException]) -> list[object]:
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
    row = grid.expert_parallel
    layer = layer_that_raises("last expert", error, is_failing=is_failing, group=row)
    return [outcome(lambda: layer(torch.randn(64, WIDTH, dtype=torch.float64)), error)]


def raises_in_backward(stays: bool) -> None:
    """The last rank's experts raise in the backward pass; it ends, or stays until others do."""
    rank, size = dist.get_rank(), dist.get_world_size()
    layer = layer_of(gate_of("top2"), own=True)
    y = layer(batch_of(rank).requires_grad_())

    def fail(_: Tensor) -> None:
        raise ValueError("the weather")

    if rank == size - 1:
        next(layer.experts.parameters()).register_hook(fail)
    said = told(y.sum().backward, ValueError if rank == size - 1 else BytesschedError)
    if rank == size - 1 and stays:
        signals().wait("others are told")
    print(said, flush=True)
    signals().set("others are told")
    os._exit(0)


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
    print(told(lambda: moe.reduce_expert_gradients(layer)), flush=True)
    if number == signal.SIGSTOP and rank == size // 2 - 1:
        os.kill(pids[-1], signal.SIGKILL)
    # The others' connections last as long as this process.
    os._exit(0)
