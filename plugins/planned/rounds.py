"""The rounds of one model: what its source hands out, sent, told of, and handed back."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from time import perf_counter_ns
from typing import Any, NamedTuple, cast

from bytesched.errors import PluginError, TransportError

from ..failures import Failures
from ..figures.meter import Meter
from ..proxies.pending_grads import PendingGrad
from ..queries import ASKING
from .buckets import Bucket, Chunk, Member
from .clocks import Clock, DeviceClock, HostClock
from .coding import coding_of
from .cutting import cut_dealt
from .halves import Halves
from .planning import Planning, first_gates
from .questions import Ask, answered, asked_of
from .sending import Sending
from .source import Source
from .splitting import Splitting, dealt
from .terms import Owners, Terms
from .turns import ModelTurns, open_turns
from .updates import Parts, Updates
from .wire import Exchanging

__all__ = ["Rounds", "Traffic"]

log = logging.getLogger("bytesched")


class Traffic(NamedTuple):
    """What has been carried since the start."""

    #: time in which something was on the wire
    busy_ns: int = 0
    chunks: int = 0
    nbytes: int = 0


class Rounds(ABC):
    """Between the source of buckets and the wire."""

    #: whose rounds they are
    source: Source

    def __init__(self, terms: Terms) -> None:
        slots, config, wire = terms.slots, terms.config, terms.wire
        self.slots = slots
        self._wire = wire
        self._setting = terms.setting
        self._halves_bytes = terms.halves_bytes
        self.observers = terms.observers
        self._failures = Failures(wire)
        device = slots[0].parameter.device
        self._clock: Clock = DeviceClock(device) if wire.has_streams else HostClock()
        self._turns: ModelTurns | None = None
        if config.share:
            self._turns = open_turns(config.share, device, wire, self._failures.check)
        #: chunks and bytes of the last round
        self._last_sent = (0, 0)
        #: for how long something is under way in a round
        self._round_busy_ns = 0
        #: rounds that are in no figures any more
        self._rounds_before = 0
        #: what has been sent in rounds of which is known for how long something was under way
        self.traffic = Traffic()
        self.planning = Planning(
            wire,
            self.observers,
            policy=config.policy,
            credit_bytes=config.credit_bytes,
            gate_of=first_gates({id(slot.parameter): place for place, slot in enumerate(slots)}),
            clock=self._clock,
        )
        self._meter = Meter(self.observers, len(slots), self._busy_ns)
        self._meter.changed(0, self._setting)
        divisor = wire.size if terms.divisor is None else terms.divisor
        coding = coding_of(config.compression, divisor)
        if coding is not None and any(slot.parameter.is_complex() for slot in slots):
            log.info("compression = %r: complex gradients are sent as they are", config.compression)
        self.sending = Sending(wire, self._failures, self._meter, self.planning, coding)
        parts = Parts(
            slots,
            self.sending,
            self._failures,
            self._meter,
            self.observers,
            wire.rank,
            config.timeout_s,
            self._setting.partition_bytes,
        )
        self.owners: Owners | None = None
        self._updates: Updates
        if terms.open_updates is None:
            self._updates = Updates(parts)
        else:
            self.owners, self._updates = terms.open_updates(parts)
        self._splitting = Splitting(wire, config.split if self._halves_bytes else "off")
        self.source = self._make_source(divisor if coding is None else 1)

    @abstractmethod
    def _make_source(self, divisor: int) -> Source:
        """The source of buckets, which divides gradients by ``divisor``."""

    @abstractmethod
    def _learned(self) -> bool:
        """Puts gates where forward passes have shown them; whether it did so now."""

    @abstractmethod
    def _began(self, chunks: int, nbytes: int) -> None:
        """A round differs in its chunks or bytes from the last one."""

    @abstractmethod
    def _round_ended(self) -> None:
        """A round has ended."""

    @property
    def order(self) -> str:
        """How gradients travel, for ``stats()``."""
        if self.owners is not None:
            return "owners"
        return "planned" if self.sending.halves is None else "halves"

    def _measure_anew(self) -> None:
        """Rounds go another way from the next one on, and figures are of those alone."""
        self._meter.begin_anew()
        self._rounds_before = self._meter.rounds

    def round_begins(self) -> None:
        """See `Listener`."""
        if self._turns is not None:
            self._turns.backward_begins()
        # A rank that has joined, and begins no backward pass, has not waited for it.
        self._listen()
        if not self.source.is_early and self._splitting.round_begins(self.source.buckets):
            self._split()
        self.sending.round_begins()
        if self.owners is not None:
            self.owners.round_begins()
        if not self.source.is_early:
            if self.owners is None and self.sending.halves is None:
                try:
                    self.planning.round_begins()
                except Exception as error:  # noqa: BLE001 - it is raised, here and elsewhere
                    self._failures.raise_first(error)
            self._meter.round_begins()

    def _listen(self) -> None:
        """What the ranks told each other is here; nothing else is under way."""
        try:
            self.planning.landed()
            self._splitting.landed()
        except Exception as error:  # noqa: BLE001 - it is raised, here and elsewhere
            self._failures.raise_first(error)

    def _split(self) -> None:
        """Gradients go in two halves from now on."""
        # All of it is the same on both ranks: what they have told each other.
        planning = self.planning
        gradients = planning.gradients(self.source.buckets)
        ways = dealt(gradients, planning.seconds_per_byte, self._halves_bytes)
        planning.close()
        self._measure_anew()
        self.source.let_go()
        self.source.cut = partial(cut_dealt, ways=ways, chunk_bytes=self._halves_bytes)
        # Who gives `halves_bytes` has such a wire.
        wire = cast(Exchanging, self._wire)
        self.sending.halves = Halves(wire, self._meter, self.observers)
        if self._wire.rank == 0:
            log.info(
                "the script asks for norms of its gradients, or scales them, before step(): every "
                "all-reduce is split into two halves"
            )

    def answer(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """See `Sums`."""
        if func not in ASKING or not (members := asked_of(args)):
            return NotImplemented
        if any(member.bucket.sums is not self for member in members):
            # Of several models: none of them knows what all of these come to.
            return NotImplemented
        ask = self._ask
        if ask is None:
            self._splitting.ask(members, self._late_bytes)
            return NotImplemented
        self._failures.check()
        try:
            with self._updates.lock:
                return answered(func, args, kwargs, ask)
        except TransportError as error:
            self._failures.raise_first(error)

    @property
    def _ask(self) -> Ask | None:
        """What answers about gradients that are on their way."""
        if self.owners is not None:
            return self.owners.measure
        return None if self.sending.halves is None else self.sending.halves.foreseen.ask

    def _late_bytes(self) -> int:
        chunks = (chunk for bucket in self.sending.buckets for chunk in bucket.chunks)
        return self.sending.outstanding_bytes(chunks)

    def layout_changes(self) -> None:
        """See `Listener`."""
        self.planning.forget()

    def ready(self, chunks: Sequence[Chunk], *, is_last: bool) -> None:
        """See `Listener`."""
        if self._failures.error is not None:
            self._failures.check()
        try:
            if self.owners is not None and not self.source.is_early:
                self.sending.hand_to_owners(chunks[0].bucket)
                self.owners.start(chunks[0].bucket)
                return
            self.sending.ready(chunks, is_last=is_last)
            if is_last and not self.source.is_early and self.sending.halves is None:
                self.planning.round_ends(self.source.buckets)
                self._splitting.round_ends()
        except TransportError as error:
            self._failures.raise_first(error)
        except RuntimeError as error:
            self._failures.check()
            name = chunks[0].name
            self._failures.raise_first(PluginError(f"{name!r} could not be sent: {error}"))

    def land(self, bucket: Bucket, why: str = "") -> None:
        """See `Listener`."""
        self._meter.landed_because = why
        self._bring([bucket], "backward")
        self.sending.land(bucket, "backward")

    def _bring(self, buckets: Sequence[Bucket], by: str) -> None:
        """What owners have of ``buckets`` comes, as far as anybody wants it; collective then."""
        owned = [bucket for bucket in buckets if bucket.is_under_way and bucket.is_with_owners]
        if not owned:
            return
        assert self.owners is not None
        self.owners.bring([bucket for bucket in owned if bucket.is_awaited], by)
        for bucket in owned:
            self.sending.have_brought(bucket)

    def settle(self, member: Member) -> None:
        """See `Sums`."""
        with self._updates.lock:
            if member.bucket.is_under_way:
                self._land(member)
                return
            if member.pending is not None and type(member.pending()) is PendingGrad:
                raise PluginError(
                    f"{member.name}.grad was landed by another thread before it was handed out"
                )
            # Another one of its bucket has brought it.
            self._meter.causes.read(member.name, 0)

    def _land(self, member: Member) -> None:
        by = f"{member.name}.grad"
        is_here = not self.sending.outstanding_bytes(member.bucket.chunks)
        began_ns = perf_counter_ns()
        if member.bucket.holds_gradients:
            # All of them become ordinary ones, over the memory that owed updates are to read.
            for other in member.bucket.members:
                self._updates.settle(other)
        self._bring([member.bucket], by)
        self.sending.land(member.bucket, by)
        self._updates.settle(member)
        waited_ns = 0 if is_here else perf_counter_ns() - began_ns
        self._meter.causes.read(member.name, waited_ns)

    def round_ends(self, buckets: Sequence[Bucket], *, is_early: bool) -> None:
        """See `Listener`."""
        if self._turns is not None:
            self._turns.backward_ends()
        self._meter.backward_ends()
        if self.owners is not None:
            self.owners.deal()
        if is_early and not self.source.is_early and self._learned():
            # A gate waits for the whole of its bundles.
            self.planning.gate_of = first_gates(
                {id(slot.parameter): slot.bundle.number for slot in self.slots}
            )
        if not is_early:
            chunks = nbytes = 0
            for bucket in buckets:
                chunks += len(bucket.chunks)
                for chunk in bucket.chunks:
                    nbytes += chunk.sent.nbytes
            if (chunks, nbytes) != self._last_sent:
                self._last_sent = chunks, nbytes
                self._meter.active(nbytes, chunks, self._setting)
                self._began(chunks, nbytes)
            if busy_ns := self._round_busy_ns:
                sent = self.traffic
                self.traffic = Traffic(
                    sent.busy_ns + busy_ns, sent.chunks + chunks, sent.nbytes + nbytes
                )
        self._round_ended()

    def land_all(self, by: str) -> None:
        """Nothing is under way, and nothing owed, that was before.

        Args:
            by: what waits for it, for figures.
        """
        # Another thread may begin a backward pass, or flush.
        with self._updates.lock:
            self._updates.apply_all(by)
            if self.owners is not None:
                self._bring(self.sending.buckets, by)
            self.sending.land_all(by)
            self._listen()
            halves = self.sending.halves
            if self.owners is not None:
                self._round_busy_ns = self.owners.busy_ns or self._round_busy_ns
            elif halves is None:
                self._round_busy_ns = self.planning.busy_ns
            elif halves.carried.spans.is_complete:
                self._round_busy_ns = halves.carried.spans.busy_ns()

    def _busy_ns(self) -> int:
        """For how long something has been under way, as far as rounds were measured."""
        return self._round_busy_ns * (self._meter.rounds - self._rounds_before)

    def let_go_of_buckets(self) -> None:
        """No copy of the gradients stays with us; nothing that matters is under way."""
        if self.owners is not None:
            self.owners.let_go()
        self.sending.forget(self.source.buckets)
        self.source.let_go()
        self.planning.close()
        self._splitting.forget()
        for slot in self.slots:
            slot.forget()
