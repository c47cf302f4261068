"""Horovod's own timeline shows the order that was chosen, and that nothing was fused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from horovod_launched import Kind
    from horovod_order_cases import HorovodTimeline
    from ranks import Ranks

Pools = Callable[[int], "Ranks"]
pytestmark = pytest.mark.procs

#: names of the operations of each phase: plain, few chunks at a time, all at a time, cut again
PHASES = ("plain.", "bytesched.0.0", "bytesched.1.0", "bytesched.2.0")


@pytest.fixture(params=["gloo", pytest.param("mpi", marks=pytest.mark.slow)])
def kind(request: pytest.FixtureRequest) -> Kind:
    # Skips where it is missing.
    request.getfixturevalue(f"hvd_{request.param}")
    kind: Kind = request.param
    return kind


def timeline(kind: Kind, path: Path, **env: str) -> tuple[HorovodTimeline, str]:
    """What Horovod wrote, and what rank 0 said."""
    from horovod_forked import run_forked
    from horovod_launched import run_fresh_horovod
    from horovod_order_cases import HorovodTimeline, train_in_phases

    marks = {"HOROVOD_TIMELINE": str(path), "HOROVOD_TIMELINE_MARK_CYCLES": "1"}
    if kind == "gloo":
        ranks = run_forked(train_in_phases, env={**marks, **env})
    else:
        ranks = run_fresh_horovod(train_in_phases, kind, env={**marks, **env}).ranks
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].stderr
    return HorovodTimeline(path), ranks[0].stderr


def test_chunks_are_reduced_in_order_of_priority(kind: Kind, tmp_path: Path) -> None:
    # In a long cycle Horovod finds many chunks, and has a choice.
    found, said = timeline(kind, tmp_path / "timeline", HOROVOD_CYCLE_TIME="10")
    plain, few_at_a_time, *all_at_once = (found.last_step(phase) for phase in PHASES)
    check_few_at_a_time(few_at_a_time)
    for cycles in all_at_once:
        # The names begin with the chunks' numbers, which are their priorities.
        assert all(names == sorted(names) for names in cycles)
        assert max(map(len, cycles)) >= 3
    # Of the same chunks, each once, although the second of these began with fewer.
    sent = [sorted(name[len("bytesched.n") :] for name in itertools.chain(*c)) for c in all_at_once]
    assert sent[0] == sent[1]
    assert [found.copies(phase) for phase in PHASES[1:]] == [0, 0, 0]
    assert "CACHE_CAPACITY" not in said
    # Or this test could not fail.
    assert any(names != sorted(names) for names in plain)
    assert found.copies("plain.") > 0


def check_few_at_a_time(cycles: list[list[str]]) -> None:
    first, *others = itertools.chain.from_iterable(cycles)
    assert len(others) > 6
    # It was on its way before any other was ready, which is why it is not the last.
    assert [*others, first] == sorted([*others, first])


@pytest.mark.parametrize(
    ("kind", "capacity"),
    [("gloo", 0), ("gloo", 4), pytest.param("mpi", 0, marks=pytest.mark.slow)],
    indirect=["kind"],
)
def test_order_without_horovods_cache(kind: Kind, capacity: int, tmp_path: Path) -> None:
    """Rank 0's credit keeps the order where Horovod remembers too little to do so."""
    found, said = timeline(kind, tmp_path / "timeline", HOROVOD_CACHE_CAPACITY=str(capacity))
    check_few_at_a_time(found.last_step(PHASES[1]))
    assert found.copies(PHASES[1]) == 0
    assert f"HOROVOD_CACHE_CAPACITY = {capacity} is less than " in said


def test_no_two_chunks_have_the_same_factors() -> None:
    """Horovod fuses what has; the numbers stay those of the factor that was asked for."""
    import torch

    from bytesched.plugins.horovod.wire import _unfused

    def in_the_end(index: int, factor: float, size: int) -> float:
        before, after = _unfused(index, torch.float32, (1 / factor, factor), size)
        assert before == 1 / factor
        # As Horovod divides.
        return after / size

    cases: list[tuple[Any, ...]] = [(f, n) for f in (1.0, 0.7, 1.9, 3.0) for n in (1, 2, 3, 5, 64)]
    for factor, size in cases:
        factors = [in_the_end(index, factor, size) for index in range(2000)]
        assert len(set(factors)) == 2000
        singles = torch.tensor(factors, dtype=torch.float64).float()
        assert (singles == torch.tensor(factor / size, dtype=torch.float64).float()).all()
    doubles = {_unfused(index, torch.float64, (0.5, 2.0), 3) for index in range(500)}
    assert len(doubles) == 500
    assert {before * after for before, after in doubles} == {1.0}
