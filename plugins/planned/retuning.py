"""Rank 0's decisions, carried to all ranks: what a session runs with from this step on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final, NamedTuple

from bytesched.tunable import Decision, RunFacts, Setting, Steps, Tuner

from ..routes.probing import FromLeader
from .clocks import Clock

log = logging.getLogger("bytesched")

#: steps until the next decision where none will be made, or not any more
_NEVER: Final = 1 << 40


class Traffic(NamedTuple):
    """What has been carried since the start."""

    #: time in which something was on the wire
    busy_ns: int = 0
    chunks: int = 0
    nbytes: int = 0


class Retuning:
    """Counts steps between decisions, measures them on rank 0, and applies what is decided.

    Args:
        tuner: who decides; None on the other ranks.
        setting: in force without a decision.
        land: returns when nothing is outstanding.
        traffic: what has been carried since the start.
        apply: goes on with a setting between the same two steps on all ranks, while nothing is
            outstanding; whether it could.
    """

    def __init__(
        self,
        tuner: Tuner | None,
        setting: Setting,
        from_leader: FromLeader,
        clock: Clock,
        *,
        land: Callable[[], object],
        traffic: Callable[[], Traffic],
        apply: Callable[[Setting], bool],
    ) -> None:
        self._tuner = tuner
        self._from_leader = from_leader
        self._clock = clock
        self._land = land
        self._traffic = traffic
        self._apply = apply
        #: in force
        self.setting = setting
        #: None until the first one
        self._decision: Decision | None = None
        #: steps until the next one
        self._left = 0
        #: a step has begun since the warm-up
        self._is_counting = False
        self._steps_seen = 0
        #: when each step since the last decision began, where they are made
        self._moments: list[Any] = []
        self._before = Traffic()

    @property
    def has_begun(self) -> bool:
        """Whether the first decision has been made."""
        return self._decision is not None

    def begin(self, facts: RunFacts) -> None:
        """The first decision is made; collective."""
        self._decide(lambda tuner: tuner.begin(facts), self.setting)

    def before_forward(self, steps: int) -> None:
        """A forward pass begins after so many calls of ``step()``.

        The first one after each of them is the same moment on all ranks.
        """
        if self._decision is None or steps == self._steps_seen:
            return
        self._steps_seen = steps
        self._left -= self._is_counting
        self._is_counting = True
        self._note_step()
        wanted = self._decision.setting
        if self._left > 0 and wanted == self.setting:
            return
        self._land()
        if self._left <= 0:
            wanted = self._decide(lambda tuner: tuner.decide(self._measured()), wanted)
        if self._apply(wanted):
            self.setting = wanted
        # Changing is no part of the step.
        self._moments.clear()
        self._note_step()

    def close(self) -> None:
        """No more decisions will be made."""
        if self._tuner is not None:
            try:
                self._tuner.close()
            except Exception:
                log.exception("the tuning could not be brought to its end")

    def _decide(self, ask: Callable[[Tuner], Decision], otherwise: Setting) -> Setting:
        """What rank 0's tuner answers, on all ranks; collective."""
        numbers = Decision(otherwise, _NEVER).numbers()
        if self._tuner is not None:
            try:
                numbers = ask(self._tuner).numbers()
            except Exception:
                log.exception("tuning has failed and ends; training goes on with %s", otherwise)
                self._tuner = None
        self._decision = Decision.of(self._from_leader(numbers))
        self._left = self._decision.next_in_steps
        return self._decision.setting

    def _note_step(self) -> None:
        if self._tuner is not None:
            self._moments.append(self._clock.moment())

    def _measured(self) -> Steps:
        before, self._before = self._before, self._traffic()
        busy_ns, chunks, nbytes = (a - b for a, b in zip(self._before, before, strict=True))
        durations_s = tuple(self._clock.seconds(*step) for step in pairwise(self._moments))
        return Steps(durations_s, busy_ns / 1e9, nbytes, chunks)
