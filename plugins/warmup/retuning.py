"""Rank 0's decisions, carried to all ranks: what a session runs with from this step on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from bytesched.tunable import Decision, RunFacts, Setting, Steps, Tuner

from .probing import FromLeader

__all__ = [
    "DECISION",
    "NEVER",
    "Decisions",
    "Retuning",
    "Traffic",
]

log = logging.getLogger("bytesched")

#: the name of what carries a decision
DECISION = "the decision of rank 0"

#: steps until the next decision where none will be made, or not any more
NEVER = 1 << 40


class Decisions:
    """Rank 0's decisions about the setting, carried to all ranks.

    Args:
        tuner: who decides; None on the other ranks.
    """

    def __init__(self, tuner: Tuner | None, from_leader: FromLeader) -> None:
        self._tuner = tuner
        self._from_leader = from_leader

    @property
    def are_made_here(self) -> bool:
        """True on rank 0, as long as tuning has not failed."""
        return self._tuner is not None

    def first(self, facts: Callable[[], RunFacts], untuned: Setting) -> Decision:
        """The first one; collective. ``facts`` are asked for where there is a tuner."""
        return self._carried(lambda tuner: tuner.begin(facts()), untuned)

    def next(self, measured: Callable[[], Steps], setting: Setting) -> Decision:
        """The one after ``setting``; collective."""
        return self._carried(lambda tuner: tuner.decide(measured()), setting)

    def close(self) -> None:
        """No more will be made."""
        if self._tuner is not None:
            try:
                self._tuner.close()
            except Exception:
                log.exception("the tuning could not be brought to its end")

    def _carried(self, ask: Callable[[Tuner], Decision], otherwise: Setting) -> Decision:
        numbers = Decision(otherwise, NEVER).numbers()
        if self._tuner is not None:
            try:
                numbers = ask(self._tuner).numbers()
            except Exception:
                log.exception("tuning has failed and ends; training goes on with %s", otherwise)
                self._tuner = None
        return Decision.of(self._from_leader(numbers))


class Changing(Protocol):
    """What a session runs with."""

    def apply(self, setting: Setting) -> None:
        """Goes on with ``setting``, as far as that is possible; nothing may be outstanding.

        Between the same two steps on all ranks.
        """

    def is_applied(self, setting: Setting) -> bool:
        """Whether it runs with ``setting`` already."""


class Clock(Protocol):
    """What happens when."""

    def moment(self) -> Any:
        """Now; on a device, when all that is queued by now is computed."""

    def seconds(self, began: Any, ended: Any) -> float:
        """From one moment to another; returns when both have come."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What has been carried since the start."""

    #: time in which something was on the wire
    busy_ns: int = 0
    chunks: int = 0
    nbytes: int = 0


class Retuning:
    """Counts steps between decisions, measures them on rank 0, and applies what is decided.

    Args:
        first: the decision that the session begins with.
        land: returns when nothing is outstanding.
        traffic: what has been carried since the start.
    """

    def __init__(
        self,
        decisions: Decisions,
        first: Decision,
        changing: Changing,
        clock: Clock,
        *,
        land: Callable[[], None],
        traffic: Callable[[], Traffic],
    ) -> None:
        self._decisions = decisions
        self._decision = first
        self._left = first.next_in_steps
        self._changing = changing
        self._clock = clock
        self._land = land
        self._traffic = traffic
        #: a step has begun since the warm-up
        self._is_counting = False
        self._steps_seen = 0
        #: when each step since the last decision began, where they are made
        self._moments: list[Any] = []
        self._before = (0, 0, 0)

    def before_forward(self, steps: int) -> None:
        """A forward pass begins after so many calls of ``step()``.

        The first one after each of them is the same moment on all ranks.
        """
        if steps == self._steps_seen:
            return
        self._steps_seen = steps
        is_due = self._step_begins()
        if not is_due and self._changing.is_applied(self._decision.setting):
            return
        self._land()
        if is_due:
            self._decision = self._decisions.next(self._measured, self._decision.setting)
            self._left = self._decision.next_in_steps
        self._changing.apply(self._decision.setting)
        # Changing is no part of the step.
        self._moments.clear()
        self._step_noted()

    def _step_begins(self) -> bool:
        """Counts; whether a decision is due."""
        if self._is_counting:
            self._left -= 1
        self._is_counting = True
        self._step_noted()
        return self._left <= 0

    def _step_noted(self) -> None:
        if self._decisions.are_made_here:
            self._moments.append(self._clock.moment())

    def _measured(self) -> Steps:
        traffic = self._traffic()
        totals = (traffic.busy_ns, traffic.nbytes, traffic.chunks)
        busy_ns, sent_bytes, sent_chunks = (
            now - before for now, before in zip(totals, self._before, strict=True)
        )
        self._before = totals
        durations_s = tuple(self._clock.seconds(*step) for step in pairwise(self._moments))
        return Steps(durations_s, busy_ns / 1e9, sent_bytes, sent_chunks)
