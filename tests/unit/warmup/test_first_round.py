"""The warm-up: ranks agree on order and sizes, and the first gradients are their mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
import torch
from laid_out import parameters
from looped import SMALL, TIMEOUT_S

from bytesched.config import Config
from bytesched.errors import PluginError
from bytesched.plugins.layout.slots import Slot
from bytesched.plugins.loopback import LoopbackBackend
from bytesched.plugins.warmup import first_round
from bytesched.plugins.warmup.first_round import WarmedUp, WarmUp
from bytesched.round import GradientEvent, GradientState
from bytesched.testing import Loopback
from bytesched.tunable import Setting

T = TypeVar("T")
MIB = 2**20
SHAPES = ((30,), (4, 5), (7,))
ORDER = (2, 0, 1)


def slots_of(rank: int, *, without: Sequence[int] = ()) -> list[Slot]:
    """Gradients are 1 on rank 0, 2 on rank 1, ...; `without` get none on this rank."""
    slots = []
    for number, parameter in enumerate(parameters(*SHAPES)):
        slot = Slot(f"p{number}", parameter)
        slot.on(GradientEvent.ROUND)
        if number not in without:
            parameter.grad = torch.full_like(parameter.detach(), rank + 1.0)
            slot.on(GradientEvent.GRADIENT)
        slots.append(slot)
    return slots


def on_ranks(reduce: Callable[[LoopbackBackend], T], ranks: int = 2) -> list[T]:
    loopback = Loopback(ranks, timeout_s=TIMEOUT_S)
    try:
        return loopback.run(lambda rank: reduce(loopback.backends[rank]))
    finally:
        loopback.close()


def test_gradients_are_the_mean_in_the_order_of_rank_0() -> None:
    def reduce(backend: LoopbackBackend) -> WarmedUp:
        order = ORDER if backend.rank == 0 else (0, 1, 2)
        warm = WarmUp(backend, Config(**SMALL), slots_of(backend.rank), cpu_load=0.0)
        return warm.reduce(order, find_unused=None)

    for warm in on_ranks(reduce):
        assert not warm.unused
        assert warm.decision.setting == Setting(256, 512)
        plan = warm.plan
        assert [slot.name for slot in plan.slots] == ["p2", "p0", "p1"]
        for slot in plan.slots:
            assert (slot.view == 1.5).all()
            assert all(slice_.grad is None for slice_ in slot.slices)
            assert slot.state is GradientState.SUMMED
        assert plan.flags_chunk is None


@pytest.mark.parametrize("find_unused", [None, True, False])
def test_a_parameter_without_a_gradient_on_one_rank(find_unused: bool | None) -> None:
    def reduce(backend: LoopbackBackend) -> WarmedUp:
        slots = slots_of(backend.rank, without=(1,) if backend.rank else ())
        warm = WarmUp(backend, Config(**SMALL), slots, cpu_load=0.0)
        return warm.reduce((0, 1, 2), find_unused=find_unused)

    for warm in on_ranks(reduce):
        assert warm.unused
        plan = warm.plan
        assert [float(slot.view.mean()) for slot in plan.slots] == [1.5, 0.5, 1.5]
        assert all(slot.state is GradientState.SUMMED for slot in plan.slots)
        assert (plan.flags_chunk is None) == (find_unused is False)


def test_a_parameter_without_a_gradient_anywhere_is_not_updated() -> None:
    def reduce(backend: LoopbackBackend) -> WarmedUp:
        slots = slots_of(backend.rank, without=(1,))
        warm = WarmUp(backend, Config(**SMALL), slots, cpu_load=0.0)
        return warm.reduce((0, 1, 2), find_unused=None)

    for plan in (warm.plan for warm in on_ranks(reduce)):
        assert [slot.state.value for slot in plan.slots] == ["summed", "free", "summed"]
        assert not plan.slots[1].view.any()


@pytest.mark.parametrize("given", [{}, {"partition_bytes": 4096}, {"credit_bytes": 8192}])
def test_sizes_that_are_open_are_the_same_on_all_ranks(given: dict[str, Any]) -> None:
    def reduce(backend: LoopbackBackend) -> WarmedUp:
        # Each rank by itself would choose something else.
        warm = WarmUp(backend, Config(**given), slots_of(backend.rank), cpu_load=0.4 * backend.rank)
        return warm.reduce(ORDER, find_unused=False)

    first, second = on_ranks(reduce)
    setting = first.decision.setting
    assert second.decision.setting == setting
    assert setting.partition_bytes == given.get("partition_bytes", setting.partition_bytes) > 0
    assert setting.credit_bytes == given.get("credit_bytes", setting.credit_bytes) > 0
    chunks = [[chunk.nbytes for chunk in warm.plan.chunks] for warm in (first, second)]
    assert chunks[0] == chunks[1]


def test_a_rank_that_is_missing_in_the_first_step_is_an_error() -> None:
    def reduce(backend: LoopbackBackend) -> None:
        # The third has joined: Horovod adds zeros for it.
        backend.size = 3
        warm = WarmUp(backend, Config(**SMALL), slots_of(backend.rank), cpu_load=0.0)
        with pytest.raises(PluginError, match="1 of 3 ranks have joined"):
            warm.reduce(ORDER, find_unused=None)

    on_ranks(reduce)


@pytest.mark.parametrize("compression", ["bf16", "fp16"])
def test_the_first_gradients_are_rounded_as_all_others(compression: str) -> None:
    def reduce(backend: LoopbackBackend) -> WarmedUp:
        slots = slots_of(backend.rank)
        for slot in slots:
            slot.parameter.grad = torch.full_like(slot.parameter.detach(), 1.0 + 2.0**-12)
        config = Config(compression=compression, **SMALL)
        warm = WarmUp(backend, config, slots, cpu_load=0.0)
        return warm.reduce(ORDER, find_unused=None)

    for plan in (warm.plan for warm in on_ranks(reduce)):
        assert all((slot.view == 1.0).all() for slot in plan.slots)


def test_moments_without_a_core_do_not_make_chunks_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the smallest sizes, the first three measurements are ten times too long."""
    now_s = 0.0
    begun: dict[int, int] = {}

    add_up = LoopbackBackend.sum

    def disturbed(backend: LoopbackBackend, tensor: torch.Tensor, name: str) -> Any:
        nonlocal now_s
        if name.startswith("probe"):
            begun[tensor.nbytes] = begun.get(tensor.nbytes, 0) + 1
            is_disturbed = begun[tensor.nbytes] <= 3 * 6 and tensor.nbytes < MIB // 2
            now_s += tensor.nbytes / 118e6 * (10 if is_disturbed else 1)
        return add_up(backend, tensor, name)

    def reduce(backend: LoopbackBackend) -> WarmedUp:
        warm = WarmUp(backend, Config(), slots_of(0), cpu_load=0.0)
        return warm.reduce(ORDER, find_unused=None)

    monkeypatch.setattr(LoopbackBackend, "sum", disturbed)
    monkeypatch.setattr(first_round, "perf_counter", lambda: now_s)
    [warm] = on_ranks(reduce, ranks=1)
    assert warm.decision.setting.partition_bytes == MIB // 4
