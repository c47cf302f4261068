"""Horovod's own timeline shows the order that was chosen, and that nothing was fused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from horovod_launched import run_fresh_horovod, why_missing

if TYPE_CHECKING:
    from horovod_launched import Kind
    from horovod_order_cases import HorovodTimeline
    from ranks import Ranks

Pools = Callable[[int], "Ranks"]

#: names of the operations of each phase
PLAIN, OURS = "plain.", "bytesched.0."


@pytest.fixture(params=["gloo", "mpi"])
def kind(request: pytest.FixtureRequest) -> Kind:
    kind: Kind = request.param
    if reason := why_missing(kind):
        pytest.skip(reason)
    return kind


def timeline(kind: Kind, path: Path, **env: str) -> tuple[HorovodTimeline, str]:
    from horovod_forked import run_forked
    from horovod_order_cases import HorovodTimeline, train_in_phases

    marks = {"HOROVOD_TIMELINE": str(path), "HOROVOD_TIMELINE_MARK_CYCLES": "1"}
    if kind == "gloo":
        ranks = run_forked(train_in_phases, env={**marks, **env})
    else:
        ranks = run_fresh_horovod(train_in_phases, kind, env={**marks, **env}).ranks
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].stderr
    return HorovodTimeline(path), ranks[0].stderr


def indices(cycles: list[list[str]]) -> list[int]:
    """Of the chunks, as they were reduced."""
    names = [name.removeprefix(OURS) for name in itertools.chain(*cycles)]
    return [int(name.partition(" of ")[0]) for name in names if " of " in name]


def test_chunks_are_reduced_in_the_order_of_their_plan(kind: Kind, tmp_path: Path) -> None:
    # In a long cycle Horovod finds many chunks, and has a choice.
    found, said = timeline(kind, tmp_path / "timeline", HOROVOD_CYCLE_TIME="10")
    cycles = found.last_step(OURS)
    assert max(map(len, cycles)) >= 3
    assert len(indices(cycles)) > 6
    assert indices(cycles) == sorted(indices(cycles), reverse=True)
    assert found.copies(OURS) == 0
    assert "CACHE_CAPACITY" not in said
    # Or this test could not fail.
    assert found.copies(PLAIN) > 0


@pytest.mark.parametrize(
    ("kind", "capacity"), [("gloo", 0), ("gloo", 4), ("mpi", 0)], indirect=["kind"]
)
def test_order_without_horovods_cache(kind: Kind, capacity: int, tmp_path: Path) -> None:
    """What is in a cache that is too small comes first."""
    found, said = timeline(kind, tmp_path / "timeline", HOROVOD_CACHE_CAPACITY=str(capacity))
    reduced = indices(found.last_step(OURS))
    assert len(reduced) > 6
    assert capacity or reduced == sorted(reduced, reverse=True)
    assert found.copies(OURS) == 0
    assert f"HOROVOD_CACHE_CAPACITY = {capacity} is less than " in said


def test_no_two_chunks_have_the_same_factors() -> None:
    """Horovod fuses what has; the numbers stay those of the factor that was asked for."""
    import torch

    from bytesched.plugins.horovod.hvd_wire import _unfused

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
