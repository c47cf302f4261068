"""Rank 0's word, carried to all ranks: what a session runs with from this step on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from bytesched.observe import Observers
from bytesched.plugins.layout.plan import Plan
from bytesched.plugins.session.backend import Backend, from_leader
from bytesched.plugins.session.carrier import Carrier
from bytesched.plugins.session.changing import Changing
from bytesched.plugins.session.recording import Recorder
from bytesched.plugins.session.settling import Settling
from bytesched.plugins.session.streams import Streams
from bytesched.tunable import RunFacts, Setting, Steps, Tuner, Word

__all__ = ["DECISION", "Retuning"]

log = logging.getLogger("bytesched")

#: the key of the sum that carries a decision
DECISION = "the decision of rank 0"

#: steps until the next word of a tuner that has failed
_NEVER = 1 << 40

#: iterations that are recorded: enough for medians, and few to look through
_RECORDED = 8


class Retuning:
    """Counts steps between words, measures them on rank 0, and passes the words on.

    Args:
        tuner: who decides; None on the other ranks.
        device: where sums are made.
        streams: know when what a step has queued is computed.
    """

    def __init__(
        self,
        tuner: Tuner | None,
        backend: Backend,
        device: torch.device,
        streams: Streams,
        changing: Changing,
    ) -> None:
        self._tuner = tuner
        self._backend = backend
        self._device = device
        self._streams = streams
        self._changing = changing
        self._word: Word
        self._left = 0
        #: a step has begun since the warm-up
        self._is_counting = False
        self._steps_seen = 0
        #: when each step since the last word began, where there is a tuner
        self._moments: list[Any] = []
        self._before = (0, 0, 0)
        #: while iterations are recorded
        self._stop_recording: Callable[[], None] | None = None
        self._recorder: Recorder | None = None
        # - after the warm-up
        self._settling: Settling
        self._carrier: Carrier

    def begin(self, facts: Callable[[], RunFacts], untuned: Setting) -> Setting:
        """The first setting; collective. ``facts`` are asked for where there is a tuner."""
        return self._agreed(lambda tuner: tuner.begin(facts()), untuned)

    def activate(
        self,
        plan: Plan,
        settling: Settling,
        carrier: Carrier,
        observers: Observers,
        recorded: Callable[[], None],
    ) -> None:
        """The warm-up is over; the first iterations are recorded, and ``recorded`` called then."""
        self._settling = settling
        self._carrier = carrier
        # What a GPU computes is queued long before: the host's times are not those of layers.
        if self._tuner is not None and self._device.type == "cpu":
            recorder = self._recorder = Recorder(plan)
            observers.add(recorder)
            settling.passed = recorder.passed

            def stop() -> None:
                observers.remove(recorder)
                settling.passed = None
                recorded()

            self._stop_recording = stop

    def before_forward(self, steps: int) -> None:
        """A forward pass begins after so many calls of ``step()``.

        The first one after each of them is the same moment on all ranks.
        """
        if steps == self._steps_seen:
            return
        self._steps_seen = steps
        is_due = self._step_begins()
        if not is_due and self._changing.is_applied(self._word.setting):
            return
        self._settling.wait_reduced()
        self._settling.settle_all()
        if is_due:
            self._agreed(lambda tuner: tuner.word(self._measured()), self._word.setting)
        self._changing.apply(self._word.setting)
        # Changing is no part of the step.
        self._moments.clear()
        self._step_noted()

    def close(self) -> None:
        """No more steps will come."""
        if self._tuner is not None:
            try:
                self._tuner.close()
            except Exception:
                log.exception("the tuning could not be brought to its end")

    def _step_begins(self) -> bool:
        """Counts; whether a word comes first."""
        if self._is_counting:
            self._left -= 1
        self._is_counting = True
        self._step_noted()
        if len(self._moments) > _RECORDED:
            self._record_no_more()
        return self._left <= 0

    def _step_noted(self) -> None:
        if self._tuner is not None:
            self._moments.append(self._streams.moment())

    def _record_no_more(self) -> None:
        if self._stop_recording is not None:
            self._stop_recording()
            self._stop_recording = None

    def _measured(self) -> Steps:
        traffic = self._carrier.traffic
        totals = (traffic.busy_ns, traffic.nbytes, traffic.chunks)
        busy_ns, sent_bytes, sent_chunks = (
            now - before for now, before in zip(totals, self._before, strict=True)
        )
        self._before = totals
        durations_s = tuple(self._streams.seconds(*step) for step in pairwise(self._moments))
        self._record_no_more()
        recordings = self._recorder.recordings() if self._recorder is not None else ()
        self._recorder = None
        return Steps(durations_s, busy_ns / 1e9, sent_bytes, sent_chunks, recordings)

    def _agreed(self, ask: Callable[[Tuner], Word], otherwise: Setting) -> Setting:
        numbers = Word(otherwise, _NEVER).numbers()
        if self._tuner is not None:
            try:
                numbers = ask(self._tuner).numbers()
            except Exception:
                log.exception("tuning has failed and ends; training goes on with %s", otherwise)
                self._tuner = None
        self._word = Word.of(from_leader(self._backend, numbers, self._device, DECISION))
        self._left = self._word.next_in_steps
        return self._word.setting
