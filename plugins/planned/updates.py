"""Updates that ``step()`` leaves to whoever uses a parameter first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from time import perf_counter_ns
from typing import Any, ClassVar, Final

import torch
from torch import nn

from bytesched.errors import PluginError, SchedulerTimeout
from bytesched.observe import Observers

from ..failures import Failures, refuse
from ..figures.meter import Meter
from ..proxies.compiling import waiting
from ..proxies.pending import PendingParameter, hold_all, release_all, synchronize_now
from ..proxies.pending_grads import PendingGrad
from ..update.deferred import Deferred
from ..update.surroundings import snapshot
from .buckets import Member, Sent, make_changes
from .bundles import Bundle, BundleState, Debt, Slot, Update, bundled
from .sending import Sending
from .spans import span

_FREE: Final = BundleState.FREE
_NO_GRADIENT: Final = type(None)


@dataclass(frozen=True, eq=False)
class Parts:
    """What the updates of one session are made with."""

    #: all parameters
    slots: Sequence[Slot]
    sending: Sending
    failures: Failures
    meter: Meter
    observers: Observers
    rank: int
    #: how long a thread waits for another one that makes an update
    timeout_s: float
    #: see `bundled`
    least_bundle_bytes: int


class Updates:
    """The steps of all optimizers of one model."""

    #: also where gradients are here when ``step()`` is called, parameters may not be after it
    late_with_any_gradient: ClassVar[bool] = False
    #: no step is ever the user's own over everything, and once it is taken no gradient can be read:
    #: so it is taken after all hooks and the closure
    takes_gradients: ClassVar[bool] = False

    def __init__(self, parts: Parts) -> None:
        self._slots = {id(slot.parameter): slot for slot in parts.slots}
        self._sending = parts.sending
        self._failures = parts.failures
        self._meter = parts.meter
        self._rank = parts.rank
        self._timeout_s = parts.timeout_s
        self._least_bundle_bytes = parts.least_bundle_bytes
        #: held while an update is awaited and made
        self.lock = threading.RLock()
        self._is_running = False
        self.bundles: list[Bundle] = []
        #: what a use of each parameter calls while it is pending, by the parameter's id
        self._uses: dict[int, Any] = {}
        self.bundle([index] for index in range(len(parts.slots)))

    def bundle(self, units: Iterable[Sequence[int]]) -> None:
        """Other bundles, see `bundled`; nothing may be owed."""
        slots = list(self._slots.values())
        self.bundles = bundled(slots, units, self._least_bundle_bytes)
        self._uses = {
            id(slot.parameter): partial(self.apply, slot.bundle, slot.name) for slot in slots
        }

    # -- step --------------------------------------------------------------------------

    def step(self, deferred: Deferred, *, whole_because: str) -> list[dict[str, Any]] | None:
        """``step()`` updates now: the groups of what cannot wait, or None if that is everything.

        Args:
            whole_because: why nothing of it can wait; empty if some can.
        """
        optimizer = deferred.optimizer
        is_whole = not deferred.cross or bool(whole_because) or self._all_is_here(optimizer)
        if not is_whole:
            whole_because = deferred.why_kept() or self._why_read_elsewhere(optimizer)
        if is_whole or whole_because:
            self._bring(optimizer)
            self._meter.stepped(0, whole_because)
            return None
        deferred.guard()
        eager, debts = self._sort(deferred)
        with self.lock:
            needed = self._owe(debts)
        self._meter.stepped(self._sending.outstanding_bytes(needed))
        return eager

    def stepped(self) -> None:
        """``step()`` has been executed, as far as it was not deferred."""

    def _all_is_here(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether nothing of what ``optimizer`` steps over is on its way any more."""
        chunks = {
            chunk: None
            for group in optimizer.param_groups
            for parameter in group["params"]
            if type(grad := parameter.grad) is PendingGrad
            for chunk in grad.sum_.chunks
        }
        return not self._sending.outstanding_bytes(chunks)

    def introduce(self, deferred: Deferred) -> None:
        """``deferred`` is one of the session's optimizers from now on."""
        for slot in self._slots.values():
            if slot.alias is not slot.parameter:
                deferred.know(slot)

    def _why_read_elsewhere(self, optimizer: torch.optim.Optimizer) -> str:
        """Whose memory others have, who would read it before it is updated; empty if nobody has."""
        # No call of Python for each of them.
        use_count = torch._C._storage_Use_Count
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                slot = self._slots.get(id(parameter))
                kind = type(parameter.grad)
                if slot is None or kind is _NO_GRADIENT:
                    continue
                if kind is not PendingGrad and not self.late_with_any_gradient:
                    continue
                if type(parameter) is PendingParameter:
                    synchronize_now(parameter)
                if (address := parameter.data_ptr()) != slot.address:
                    slot.lies_at(address)
                storage = parameter.untyped_storage()
                if slot.is_shared or use_count(storage._cdata) > slot.known_uses:
                    return f"the memory of {slot.name!r} is used elsewhere, too"
        return ""

    def _bring(self, optimizer: torch.optim.Optimizer) -> None:
        """Gradients and parameters of ``optimizer`` are here, and ordinary tensors."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if type(parameter) is PendingParameter:
                    synchronize_now(parameter)
                if type(grad := parameter.grad) is PendingGrad:
                    grad.sum_.settle()

    def _sort(self, deferred: Deferred) -> tuple[list[dict[str, Any]], list[Debt]]:
        """The groups, with what is stepped right now, and what is owed."""
        optimizer = deferred.optimizer
        eager: list[dict[str, Any]] = []
        debts: list[Debt] = []
        #: a group may name a parameter twice
        seen: set[int] = set()
        by = deferred.now()
        for group in optimizer.param_groups:
            now = []
            owed: dict[Bundle, list[Slot]] = {}
            for parameter in group["params"]:
                key = id(parameter)
                slot = self._slots.get(key)
                grad = parameter.grad
                if type(parameter) is PendingParameter:
                    synchronize_now(parameter)
                if slot is not None and type(grad) is PendingGrad and key not in seen:
                    member = grad.sum_
                    if member.parameter is parameter:
                        if slot.take(member):
                            deferred.know(slot)
                        member.taken = True
                        seen.add(key)
                        owed.setdefault(slot.bundle, []).append(slot)
                        continue
                if grad is not None:
                    now.append(parameter)
            eager.append({**group, "params": now})
            if owed:
                taken = snapshot(group)
                debts += [Debt(by, taken, slots) for slots in owed.values()]
        return eager, debts

    def _owe(self, debts: list[Debt]) -> Iterable[Sent]:
        """Parameters wait for ``debts`` from now on; returns what these need."""
        chunks: dict[Sent, None] = {}
        for debt in debts:
            if not debt.hyperparameters.get("fused"):
                # As the update would: a graph that has saved the old values raises.
                _increment_versions([slot.parameter for slot in debt.slots])
            bundle = debt.slots[0].bundle
            needed = {sent: None for slot in debt.slots for sent in slot.awaits or ()}
            bundle.chunks.update(needed)
            chunks.update(needed)
            bundle.debts.append(debt)
            bundle.state = BundleState.OWED
            hold_all(self._held(debt.slots))
        return chunks

    def _held(self, slots: Iterable[Slot]) -> list[tuple[nn.Parameter, Callable[[], None]]]:
        return [(slot.parameter, self._uses[id(slot.parameter)]) for slot in slots]

    # -- use ---------------------------------------------------------------------------

    def apply(self, bundle: Bundle, by: str) -> None:
        """Returns when nothing is owed for ``bundle``, and its parameters are ordinary ones."""
        if not self.lock.acquire(timeout=self._timeout_s):
            raise SchedulerTimeout(
                f"{by} has waited {self._timeout_s:g} s for an update that another thread makes",
                rank=self._rank,
            )
        try:
            if self._is_running and bundle.state is not _FREE:
                raise PluginError(
                    f"{by} is used on rank {self._rank} by what runs inside an update: a "
                    "signal handler, or an optimizer that does not update each parameter on its "
                    "own. Do not vouch for its class by bytesched.separable, or set "
                    "cross_barrier = False"
                )
            if bundle.state is BundleState.OWED:
                self._failures.check()
                with waiting():
                    while self._sending.outstanding(bundle.chunks) and self._update(self._come()):
                        pass
                    self._sending.wait(bundle.chunks, by)
                    if bundle.state is BundleState.OWED:
                        self._update({**self._come(), bundle: bundle.chunks.keys()})
            release_all(self._held(bundle.slots))
        finally:
            self.lock.release()

    def _come(self) -> dict[Bundle, Set[Sent]]:
        """What is owed, with the sums of it that are here: one call costs less than one for each.

        Where a device waits, and the host does not, nothing is.
        """
        here: dict[Bundle, Set[Sent]] = {}
        if self._sending.has_streams:
            return here
        for bundle in self.bundles:
            if bundle.state is BundleState.OWED:
                late = set(self._sending.outstanding(bundle.chunks))
                if come := {chunk: None for chunk in bundle.chunks if chunk not in late}:
                    self._sending.wait(come, "step")
                    here[bundle] = come.keys()
        # A signal handler may have been quicker.
        return {bundle: come for bundle, come in here.items() if bundle.state is BundleState.OWED}

    def _update(self, parts: Mapping[Bundle, Set[Sent]]) -> bool:
        """Makes what is owed by each bundle and needs nothing but these sums; whether it did."""
        began_ns = perf_counter_ns()
        due: list[Debt] = []
        left: dict[Bundle, list[Debt]] = {}
        # From here on a signal handler that uses any of them is refused.
        self._is_running = True
        try:
            for bundle, here in parts.items():
                debts, rest = bundle.split(here)
                if debts:
                    due += debts
                    left[bundle] = rest
            if not due:
                return False
            for bundle in left:
                bundle.state = BundleState.RUNNING
            with span("bytesched::update"), self._sending.alone():
                slots = {slot: None for debt in due for slot in debt.slots}
                make_changes([slot.member for slot in slots if slot.member is not None])
                for by, groups in calls(due):
                    by(groups)
        except BaseException as error:
            # What was updated and what was not is not known any more.
            self._failures.fail(error, is_raised=True)
            for bundle in left:
                bundle.state = BundleState.OWED
            raise
        finally:
            self._is_running = False
        for bundle, rest in left.items():
            bundle.debts = rest
            bundle.state = BundleState.OWED if rest else BundleState.FREE
            if not rest:
                bundle.chunks.clear()
        release_all(self._held(slots))
        self._meter.updated(next(iter(left)).slots[0].name, len(left), began_ns)
        return True

    def apply_all(self, by: str = "flush") -> None:
        """Nothing is owed any more."""
        for bundle in self.bundles:
            if bundle.state is not _FREE:
                self.apply(bundle, by)

    def settle(self, member: Member) -> None:
        """The gradient of ``member`` is read: its sum is there, and no update is owed."""
        slot = self._slots.get(id(member.parameter))
        if slot is not None and slot.bundle.state is not _FREE:
            self.apply(slot.bundle, f"{member.name}.grad")

    @property
    def owed(self) -> int:
        """How many bundles wait for their update."""
        return sum(bundle.state is not _FREE for bundle in self.bundles)

    def forget(self) -> None:
        """Nothing is owed any more, and nothing of it is made: parameters are as they are."""
        for bundle in self.bundles:
            bundle.debts.clear()
            bundle.chunks.clear()
            bundle.state = BundleState.FREE
            release_all(self._held(bundle.slots))

    def disown(self) -> None:
        """In a forked child: parameters whose update is owed raise PluginError when used."""
        for bundle in self.bundles:
            if bundle.state is not _FREE:
                hold_all([(slot.parameter, partial(refuse, slot.name)) for slot in bundle.slots])

    def __repr__(self) -> str:
        return f"<Updates: {self.owed} of {len(self.bundles)} bundles owed>"


def calls(
    debts: Iterable[Debt],
) -> Iterable[tuple[Update, list[tuple[dict[str, Any], list[Slot]]]]]:
    """Each step by itself, with all of its groups, in the order in which they were left.

    So parameters over one memory are updated in the optimizer's.
    """
    steps: dict[Update, dict[int, tuple[dict[str, Any], list[Slot]]]] = {}
    for debt in sorted(debts, key=attrgetter("number")):
        groups = steps.setdefault(debt.by, {})
        taken = debt.hyperparameters
        groups.setdefault(id(taken), (taken, []))[1].extend(debt.slots)
    return [(by, list(groups.values())) for by, groups in steps.items()]


def _increment_versions(parameters: list[nn.Parameter]) -> None:
    increment = torch.autograd.graph.increment_version
    if "Iterable" in str(increment.__annotations__):
        increment(parameters)
        return
    # Older ones take one.
    for parameter in parameters:
        increment(parameter)
