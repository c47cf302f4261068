"""The sizes of one session, changed between two of its steps as rank 0 decides."""

from __future__ import annotations

import hashlib
import logging
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

import torch

from bytesched.tunable import Decision, RunFacts, Setting, Steps, Tuner
from bytesched.tuning.online import find_tuner

from ..failures import Failures
from ..routes.probing import probes
from .clocks import Clock
from .planning import PLANNED_IN
from .rounds import Rounds, Traffic
from .terms import Terms

log = logging.getLogger("bytesched")

_KNOBS: Final = frozenset({"partition_bytes", "credit_bytes", "policy"})
_HOST_BYTES: Final = 6
#: steps until the next decision where none will be made, or not any more
_NEVER: Final = 1 << 40


class Tuned:
    """Asks the tuner of rank 0 for a setting, measures steps there, and goes on with it everywhere.

    The first decision is made at the end of the first round, and each change in a forward pass,
    between the same two steps on all ranks, while nothing is under way.

    Args:
        rounds: what is measured; its setting is the one in force, as without a tuner.
        can_stop: gradients can be the framework's for a while.
        changed_steps: steps after a change that show nothing.
        change: goes on with a setting; whether it could.
    """

    def __init__(
        self,
        terms: Terms,
        rounds: Rounds,
        clock: Clock,
        failures: Failures,
        *,
        can_stop: bool,
        changed_steps: int,
        change: Callable[[Setting], bool],
    ) -> None:
        self._slots = [slot for slot in terms.slots if slot.parameter.requires_grad]
        self._config = terms.config
        self._wire = terms.wire
        self._failures = failures
        self._rounds = rounds
        self._clock = clock
        self._carrier = terms.carrier
        self._knobs = _KNOBS | {"enabled"} if can_stop else _KNOBS
        self._changed_steps = changed_steps
        self._untuned = replace(terms.setting, enabled=True)
        self._change = change
        #: None on the other ranks
        self._tuner: Tuner | None = find_tuner(terms.config) if terms.wire.rank == 0 else None
        #: in force
        self._setting = self._untuned
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

    def round_ends(self) -> None:
        """A round is over, and with the first one a decision is made; collective."""
        if self._decision is None:
            self._rounds.sending.land_all("backward")
            facts = self._facts()
            self._decide(lambda tuner: tuner.begin(facts), self._setting)

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
        if self._left > 0 and wanted == self._setting:
            return
        self._rounds.land_all("forward")
        if self._left <= 0:
            wanted = self._decide(lambda tuner: tuner.decide(self._measured()), wanted)
        if wanted == self._setting:
            self._rounds.planning.measure_again()
        elif self._change(wanted):
            self._setting = wanted
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

    def credit_bytes(self, setting: Setting) -> int:
        """That of a plan: as given, where nothing is tuned."""
        return self._config.credit_bytes if setting == self._untuned else setting.credit_bytes

    # -- decisions ---------------------------------------------------------------------

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
        before, self._before = self._before, self._rounds.traffic
        busy_ns, chunks, nbytes = (a - b for a, b in zip(self._before, before, strict=True))
        durations_s = tuple(self._clock.seconds(*step) for step in pairwise(self._moments))
        return Steps(durations_s, busy_ns / 1e9, nbytes, chunks)

    def _facts(self) -> RunFacts:
        parameters = [slot.parameter for slot in self._slots]
        model_bytes = sum(parameter.nbytes for parameter in parameters)
        device = parameters[0].device
        found = probes(self._wire.start, self._wait, self._from_leader, device, model_bytes)
        hosts = self._ranks_per_host()
        shapes = [(tuple(parameter.shape), str(parameter.dtype)) for parameter in parameters]
        # What else decides how much is sent, and when it is needed.
        sent = shapes, self._config.compression, self._config.cross_barrier
        is_cuda = device.type == "cuda"
        return RunFacts(
            backend=self._carrier,
            ranks_per_host=hosts,
            device=torch.cuda.get_device_name(device) if is_cuda else device.type,
            framework=f"torch {torch.__version__}",
            model_bytes=model_bytes,
            signature=hashlib.sha256(repr(sent).encode()).hexdigest()[:16],
            probes=tuple(found),
            untuned=self._untuned,
            knobs=self._knobs,
            first_steps=2 + PLANNED_IN,
            changed_steps=self._changed_steps,
        )

    def _ranks_per_host(self) -> tuple[int, ...]:
        """How many ranks each host has, the largest number first; collective."""
        hosts = [0] * self._wire.size
        digest = hashlib.sha256(socket.gethostname().encode()).digest()
        hosts[self._wire.rank] = int.from_bytes(digest[:_HOST_BYTES], "little")
        return tuple(sorted(Counter(self._largest(hosts)).values(), reverse=True))

    # -- between ranks -----------------------------------------------------------------

    def _from_leader(self, values: Sequence[int]) -> list[int]:
        return self._largest(values if self._wire.rank == 0 else [0] * len(values))

    def _largest(self, values: Sequence[int]) -> list[int]:
        """The largest of all ranks, for each of ``values``, which are not negative; collective."""
        numbers = torch.tensor(values, dtype=torch.float64, device="cpu")
        self._wait(self._wire.start_largest(numbers), "the decision of rank 0")
        return [int(number) for number in numbers.tolist()]

    def _wait(self, work: object, task: str) -> None:
        try:
            self._wire.wait(work, task)
        except Exception as error:  # noqa: BLE001 - it is raised, here and elsewhere
            self._failures.raise_first(error)
