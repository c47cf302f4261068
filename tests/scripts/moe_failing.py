"""What ranks of mixture of experts do where one of them raises, stands still or dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from moe_cases import EXPERTS, WIDTH, experts_of, gate_of
from torch import Tensor, nn

from bytesched.errors import BytesschedError
from bytesched.plugins import moe
from bytesched.urgency import URGENCY


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
