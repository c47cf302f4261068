"""The sizes of one session, changed between two of its steps as rank 0 decides."""

from __future__ import annotations

import hashlib
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import torch

from bytesched.tunable import RunFacts, Setting
from bytesched.tuning.online import find_tuner

from ..failures import Failures
from ..routes.probing import probes
from .clocks import Clock
from .planning import PLANNED_IN
from .retuning import Retuning
from .rounds import Rounds
from .terms import Terms

_KNOBS: Final = frozenset({"partition_bytes", "credit_bytes", "policy"})
_HOST_BYTES: Final = 6


class Tuned:
    """Asks the tuner of rank 0 for a setting, and goes on with it on all ranks.

    The first decision is made at the end of the first round, and each change in a forward pass,
    while nothing is under way.

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
        self._carrier = terms.carrier
        self._knobs = _KNOBS | {"enabled"} if can_stop else _KNOBS
        self._changed_steps = changed_steps
        self._untuned = replace(terms.setting, enabled=True)
        self._change = change
        self._retuning = Retuning(
            find_tuner(terms.config) if terms.wire.rank == 0 else None,
            self._untuned,
            self._from_leader,
            clock,
            land=lambda: rounds.land_all("forward"),
            traffic=lambda: rounds.traffic,
            apply=self._apply,
        )
        self.close = self._retuning.close
        #: a forward pass begins after so many calls of ``step()``
        self.before_forward = self._retuning.before_forward

    def round_ends(self) -> None:
        """A round is over, and with the first one a decision is made; collective."""
        if not self._retuning.has_begun:
            self._rounds.sending.land_all("backward")
            self._retuning.begin(self._facts())

    def _apply(self, setting: Setting) -> bool:
        """See `Retuning`."""
        if setting != self._retuning.setting:
            return self._change(setting)
        self._rounds.planning.measure_again()
        return True

    def credit_bytes(self, setting: Setting) -> int:
        """That of a plan: as given, where nothing is tuned."""
        return self._config.credit_bytes if setting == self._untuned else setting.credit_bytes

    # -- the first decision ------------------------------------------------------------

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
