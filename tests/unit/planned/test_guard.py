"""Turns of a guard, over a wire to nobody, with a clock and collectives that the tests move."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bytesched.plugins.planned import guard as guards
from bytesched.plugins.planned.guard import Guard, collectives_of

#: collectives of a round without the plan: a small bucket and three
BUCKETS = 4


class Wire:
    """Of one rank, and what another one would have told."""

    def __init__(self) -> None:
        self.others: torch.Tensor | None = None

    def start_largest(self, numbers: torch.Tensor) -> None:
        if self.others is not None:
            torch.maximum(numbers, self.others, out=numbers)

    def wait(self, work: Any, task: str) -> None:
        pass


class Clock:
    now_s = 0.0

    def moment(self) -> float:
        return self.now_s

    def seconds(self, began: float, ended: float) -> float:
        return ended - began


class Run:
    """A training loop: what its ranks do, on one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.wire = Clock(), Wire()
        self.rounds = self.collectives = 0
        self.planned_s, self.plain_s = 0.010, 0.012
        self.is_planned = True
        #: in which iterations it went from one to the other
        self.changes: list[int] = []
        wire: Any = self.wire
        clock: Any = self.clock
        self.guard = Guard(wire, clock, lambda: self.collectives, BUCKETS)
        monkeypatch.setattr(guards, "perf_counter_ns", lambda: int(1e9 * self.clock.now_s))

    def train(self, iterations: int, beside: int = 0) -> None:
        """So many iterations, with so many collectives of the script's own in each."""
        for _ in range(iterations):
            iteration = self.rounds + 1
            if self.is_planned and self.guard.is_over(self.rounds):
                if self.guard.can_leave():
                    self.is_planned = False
                    self.guard.plain_begins()
                    self.changes.append(iteration)
            elif not self.is_planned and self.guard.is_planned_next():
                self.is_planned = True
                self.guard.planned_begins(self.rounds)
                self.changes.append(iteration)
            self.rounds += 1
            self.collectives += beside + (0 if self.is_planned else BUCKETS)
            if self.is_planned:
                self.guard.round_ends()
            self.clock.now_s += self.planned_s if self.is_planned else self.plain_s


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(monkeypatch)


def test_a_plan_that_is_faster_stays_after_one_turn(run: Run) -> None:
    run.train(100)
    left, back = run.changes
    assert left == guards._SETTLED + guards._COUNTED + 1
    assert back - left == guards._PLAIN_ROUNDS
    assert run.guard.decision is not None
    assert run.guard.decision.ratio == pytest.approx(1.2)
    run.train(guards._LASTS)
    assert len(run.changes) == 4, "it is looked at again"


@pytest.mark.parametrize("beside", [1, 7])
def test_collectives_of_the_script_are_no_buckets(run: Run, beside: int) -> None:
    run.train(100, beside)
    left, back = run.changes
    assert back - left == guards._PLAIN_ROUNDS


def test_a_plan_that_is_slower_is_left(run: Run) -> None:
    run.planned_s = 0.014
    run.train(100)
    assert len(run.changes) == 1
    assert not run.is_planned
    assert str(run.guard.decision) == (
        "12 ms with plain DDP, 14 with bytesched (8 iterations each): plain DDP is faster here, so "
        "DDP goes on by itself"
    )


def test_neither_is_ahead(run: Run) -> None:
    """Three turns, and DDP goes on by itself."""
    run.planned_s = run.plain_s
    run.train(200)
    assert len(run.changes) == 5
    assert not run.is_planned


def test_ranks_that_stood_aside_look_again_when_iterations_have_changed(run: Run) -> None:
    run.planned_s = 0.014
    run.train(100)
    run.plain_s = 0.020
    run.train(2 * guards._ASKED_AFTER)
    assert run.is_planned
    assert run.guard.decision is not None
    assert run.guard.decision.ratio == pytest.approx(20 / 14)


def test_ranks_that_stood_aside_look_again_after_a_while(run: Run) -> None:
    run.planned_s = 0.014
    run.train(guards._LASTS + guards._ASKED_AFTER + 100)
    assert len(run.changes) == 3
    assert not run.is_planned
    run.train(guards._LASTS + guards._ASKED_AFTER)
    assert len(run.changes) == 3, "later each time"


def test_the_slowest_rank_counts(run: Run) -> None:
    run.train(guards._SETTLED + guards._COUNTED + 2)
    assert not run.is_planned
    slow = torch.tensor([0.014] * guards._COUNTED + [0.0] * guards._COUNTED, dtype=torch.float64)
    run.wire.others = slow
    run.train(guards._PLAIN_ROUNDS)
    assert not run.is_planned
    assert run.guard.decision is not None
    assert run.guard.decision.planned_s == pytest.approx(0.014)


def test_ranks_with_other_collectives_keep_the_plan(run: Run) -> None:
    """They would not know in which round to come back."""
    run.train(guards._SETTLED + guards._COUNTED)
    run.wire.others = torch.tensor([1e6, 0.0], dtype=torch.float64)
    run.train(1)
    assert run.is_planned
    assert not run.changes


def test_a_back_end_that_counts_nothing_takes_no_turns() -> None:
    def refuse() -> int:
        raise RuntimeError("no sequence numbers")

    backend = SimpleNamespace(_get_sequence_number_for_group=refuse)
    ddp: Any = SimpleNamespace(process_group=SimpleNamespace(_get_backend=lambda device: backend))
    assert collectives_of(ddp, torch.device("cpu")) is None
