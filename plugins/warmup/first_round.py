"""The first synchronised backward pass: reduced as a whole, and what is learned meanwhile."""

from __future__ import annotations

import hashlib
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from bytesched.config import Config
from bytesched.errors import PluginError
from bytesched.link.sizes import RULES, Probe, chosen_sizes
from bytesched.round import GradientEvent, GradientState
from bytesched.tunable import Decision, RunFacts, Setting

from ..layout.packing import Packer
from ..layout.plan import Plan
from ..layout.slots import Slot
from ..routes.backend import Backend, from_leader
from .probing import Probing
from .retuning import NEVER, Decisions

__all__ = ["WARM_UP", "WarmUp", "WarmedUp"]

#: the key of all sums of whole numbers here, of which there is at least one
WARM_UP = "warm-up"

_TASK = "the first iteration"

#: first steps that show nothing, where an order is planned in them and where not
_PLANNED_STEPS, _STEPS = 8, 2


@dataclass(frozen=True, eq=False)
class WarmedUp:
    """What the first round has shown, on all ranks the same."""

    #: with all gradients averaged in its arenas
    plan: Plan
    packer: Packer
    #: some parameter got no gradient on some rank
    unused: bool
    #: what training begins with, and until when if it is tuned
    decision: Decision


class WarmUp:
    """Agrees on the order, measures the link, chooses sizes, builds the plan and reduces it.

    Everything here happens in the user's thread, in the same order on all ranks.

    Args:
        cpu_load: CPU time of the step over its time; 1 is one core.
        decisions: of rank 0 about the setting, if it is tuned.
        knobs: what can be changed at run time.
    """

    def __init__(
        self,
        backend: Backend,
        config: Config,
        slots: Sequence[Slot],
        *,
        cpu_load: float,
        decisions: Decisions | None = None,
        knobs: frozenset[str] = frozenset(),
    ) -> None:
        self._backend = backend
        self._config = config
        self._slots = slots
        self._decisions = decisions
        self._knobs = knobs
        self._device = slots[0].parameter.device
        # A model on a GPU does not compute on the cores that chunks cost time on.
        self._cpu_load = cpu_load if self._device.type == "cpu" else 0.0

    def reduce(self, order: Sequence[int], *, find_unused: bool | None) -> WarmedUp:
        """The plan, with all gradients averaged in its arenas; collective.

        Args:
            order: of first use, as indices of slots; that of rank 0 is taken.
            find_unused: whether parameters may get no gradient; None if this round is to show it.
        """
        slots = self._slots
        fired = [int(s.state is GradientState.TRAVELLING or s.is_local) for s in slots]
        present, *counts = self._sum([1, *fired])
        if present < self._backend.size:
            raise PluginError(
                f"{self._backend.size - present} of {self._backend.size} ranks have joined "
                "(hvd.join) in the first step: every rank needs one batch at least"
            )
        unused = any(count < self._backend.size for count in counts)
        for slot, count in zip(slots, counts, strict=True):
            if slot.state is GradientState.AWAITED:
                slot.on(GradientEvent.NONE)
                slot.on(GradientEvent.USED if count else GradientEvent.UNUSED)
            slot.is_local = False
        agreed = self._from_leader(list(order))
        ordered = [self._slots[index] for index in agreed]
        decision = self._choose_sizes(ordered)
        plan = Plan(
            ordered,
            partition_bytes=decision.setting.partition_bytes,
            find_unused=unused if find_unused is None else find_unused,
        )
        for slot in plan.slots:
            slot.take_gradient()
        packer = Packer(plan, self._backend.divisor, self._config.compression)
        for chunk in plan.chunks:
            if chunk is not plan.flags_chunk:
                work = self._backend.reduce(chunk, packer.pack(chunk))
                self._backend.wait(work, task=_TASK)
                packer.receive(chunk)
                packer.let_go(chunk)
        for slot in plan.slots:
            slot.on(GradientEvent.SUM)
        # Gradients of another stream are let go of next, and must have been read by then.
        self._synchronize()
        return WarmedUp(plan, packer, unused, decision)

    def _choose_sizes(self, ordered: Sequence[Slot]) -> Decision:
        partition_bytes = self._config.partition_bytes
        credit_bytes = self._config.credit_bytes
        policy = self._config.policy
        if self._decisions is None and partition_bytes and credit_bytes:
            return Decision(Setting(partition_bytes, credit_bytes, policy), NEVER)
        probes: list[Probe] = []
        model_bytes = sum(s.parameter.nbytes for s in ordered)
        if self._decisions is not None or not partition_bytes:
            backend = self._backend
            probing = Probing(
                backend.sum,
                lambda work, task: backend.wait(work, task=task),
                lambda values: self._from_leader([*values]),
                self._device,
            )
            probes = probing.probes(model_bytes)
        sizes = chosen_sizes(
            probes,
            model_bytes=model_bytes,
            cpu_load=self._cpu_load,
            rule=RULES[self._backend.sizes],
            partition_bytes=partition_bytes,
            credit_bytes=credit_bytes,
        )
        partition_bytes, credit_bytes = self._from_leader(list(sizes))
        untuned = Setting(partition_bytes, credit_bytes, policy)
        if self._decisions is None:
            return Decision(untuned, NEVER)
        hosts = self._ranks_per_host()
        facts = partial(self._facts, ordered, model_bytes, hosts, probes, untuned)
        return self._decisions.first(facts, untuned)

    def _facts(
        self,
        ordered: Sequence[Slot],
        model_bytes: int,
        ranks_per_host: tuple[int, ...],
        probes: Sequence[Probe],
        untuned: Setting,
    ) -> RunFacts:
        shapes = [(tuple(s.parameter.shape), str(s.parameter.dtype)) for s in ordered]
        # What else decides how much is sent, and when it is needed.
        sent = shapes, self._config.compression, self._config.cross_barrier
        cuda = self._device.type == "cuda"
        return RunFacts(
            backend=self._backend.wire,
            ranks_per_host=ranks_per_host,
            device=torch.cuda.get_device_name(self._device) if cuda else self._device.type,
            framework=f"torch {torch.__version__}",
            model_bytes=model_bytes,
            signature=hashlib.sha256(repr(sent).encode()).hexdigest()[:16],
            probes=tuple(probes),
            untuned=untuned,
            knobs=self._knobs,
            first_steps=_PLANNED_STEPS if self._backend.plans else _STEPS,
            changed_steps=1,
        )

    def _ranks_per_host(self) -> tuple[int, ...]:
        """How many ranks each host has, the largest number first; collective."""
        digest = hashlib.sha256(socket.gethostname().encode()).digest()
        hosts = [0] * self._backend.size
        hosts[self._backend.rank] = int.from_bytes(digest[:7], "big")
        return tuple(sorted(Counter(self._sum(hosts)).values(), reverse=True))

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _sum(self, values: list[int]) -> list[int]:
        tensor = torch.tensor(values, dtype=torch.int64, device=self._device)
        self._add_up(tensor)
        return [int(value) for value in tensor.tolist()]

    def _from_leader(self, values: list[int]) -> list[int]:
        return from_leader(self._backend, values, self._device, WARM_UP)

    def _add_up(self, tensor: torch.Tensor) -> None:
        self._backend.wait(self._backend.sum(tensor, WARM_UP), task=_TASK)
