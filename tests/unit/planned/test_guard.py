"""Turns of a guard, over a wire to nobody, with a clock and rounds that the tests move."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bytesched.plugins.planned import guard as guards
from bytesched.plugins.planned.guard import Guard, collectives_of
from bytesched.verdict import MOST_TURNS

#: those of a turn without the plan: what does not count, a block, and one until all are heard
PLAIN_ROUNDS = guards._SETTLED_PLAIN + guards._COUNTED_FIRST + 1


class Wire:
    """Of one rank, and what another one would have told."""

    def __init__(self) -> None:
        self.others: torch.Tensor | None = None

    def start_largest(self, numbers: torch.Tensor) -> None:
        if self.others is not None:
            torch.maximum(numbers, self.others, out=numbers)

    def wait(self, work: Any, task: str) -> None:
        pass


class Run:
    """A training loop: what its ranks do, on one of them."""

    def __init__(self) -> None:
        self.now_s, self.wire = 0.0, Wire()
        #: with the plan
        self.rounds = 0
        self.planned_s, self.plain_s = 1.0, 1.2
        self.is_planned = True
        #: in which iterations it went from one to the other
        self.changes: list[int] = []
        self.iteration = 0
        wire: Any = self.wire
        clock: Any = SimpleNamespace(moment=lambda: self.now_s, seconds=lambda a, b: b - a)
        self.guard: Any = Guard(wire, clock)

    def train(self, iterations: int, passes: int = 1, rounds: int = 1) -> None:
        """So many iterations, each of so many forward passes and rounds."""
        for _ in range(iterations):
            self.iteration += 1
            for _ in range(passes):
                self._forward()
            if self.is_planned:
                self.rounds += rounds
            else:
                for _ in range(rounds):
                    self.guard.plain_round_ends()
            self.now_s += self.planned_s if self.is_planned else self.plain_s

    def _forward(self) -> None:
        if self.is_planned:
            if self.guard.planned_forward(self.rounds):
                self.guard.plain_begins()
                self.is_planned = False
                self.changes.append(self.iteration)
            return
        self.guard.plain_forward()
        if self.guard.is_planned_next:
            self.guard.planned_begins(self.rounds)
            self.is_planned = True
            self.changes.append(self.iteration)


@pytest.fixture
def run() -> Run:
    return Run()


@pytest.mark.parametrize("passes", [1, 3])
def test_a_plan_that_is_faster_stays_after_one_turn(run: Run, passes: int) -> None:
    """However many passes an iteration has, as with accumulation."""
    run.train(100, passes)
    left, back = run.changes
    assert left == guards._SETTLED + guards._COUNTED_FIRST + 1
    assert back - left == PLAIN_ROUNDS
    assert run.guard.decision.ratio == pytest.approx(1.2)
    assert run.guard.decision.iterations == guards._COUNTED_FIRST
    run.train(guards._LASTS)
    assert len(run.changes) == 4, "it is looked at again"


def test_a_plan_that_is_slower_is_left(run: Run) -> None:
    run.planned_s = 1.4
    run.train(100)
    assert len(run.changes) == 1
    assert not run.is_planned
    assert run.guard.figures()["stood_aside"] == 1
    assert str(run.guard.decision) == (
        "1200 ms with plain DDP, 1400 with bytesched (4 iterations each): plain DDP is faster "
        "here, so DDP goes on by itself"
    )


@pytest.mark.parametrize(("planned_s", "plain_s"), [(1.4, 1.0), (0.014, 0.01), (1.2, 1.0)])
def test_a_slower_plan_costs_a_hundredth_of_500_iterations(
    run: Run, planned_s: float, plain_s: float
) -> None:
    """Short iterations, too."""
    run.planned_s, run.plain_s = planned_s, plain_s
    run.train(500)
    assert not run.is_planned
    assert run.now_s <= 505 * plain_s


def test_neither_is_ahead(run: Run) -> None:
    """Some turns, and DDP goes on by itself."""
    run.planned_s = run.plain_s
    run.train(200)
    assert len(run.changes) == 2 * MOST_TURNS - 1
    assert not run.is_planned


def test_where_nothing_can_be_compared_the_plan_stays(run: Run) -> None:
    run.train(2000, rounds=30)
    assert len(run.changes) == 2 * MOST_TURNS
    assert run.is_planned
    assert run.guard.figures() == {}


def test_ranks_that_stood_aside_look_again_when_iterations_have_changed(run: Run) -> None:
    run.planned_s = 1.4
    run.train(100)
    run.plain_s = 2.0
    run.train(2 * guards._ASKED_AFTER)
    assert run.is_planned
    assert run.guard.decision.ratio == pytest.approx(20 / 14)


def test_ranks_that_stood_aside_look_again_after_a_while(run: Run) -> None:
    run.planned_s = 1.4
    run.train(guards._LASTS + guards._ASKED_AFTER + 100)
    assert len(run.changes) == 3
    assert not run.is_planned
    run.train(guards._LASTS + guards._ASKED_AFTER)
    assert len(run.changes) == 3, "later each time"


def test_the_slowest_rank_counts(run: Run) -> None:
    run.train(guards._SETTLED + guards._COUNTED_FIRST + 2)
    assert not run.is_planned
    times = [1.4] * guards._COUNTED + [0.0] * guards._COUNTED
    run.wire.others = torch.tensor([-float("inf"), *times], dtype=torch.float64)
    run.train(PLAIN_ROUNDS)
    assert not run.is_planned
    assert run.guard.decision.planned_s == pytest.approx(1.4)


def test_a_back_end_that_counts_nothing_takes_no_turns() -> None:
    def refuse() -> int:
        raise RuntimeError("no sequence numbers")

    backend = SimpleNamespace(_get_sequence_number_for_group=refuse)
    ddp: Any = SimpleNamespace(process_group=SimpleNamespace(_get_backend=lambda device: backend))
    assert collectives_of(ddp, torch.device("cpu")) is None
