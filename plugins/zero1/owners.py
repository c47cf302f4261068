"""The owners of one session: what they are, and what goes to them and comes from them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from bytesched.errors import PluginError, TransportError

from ..planned.buckets import Bucket, Member
from ..planned.questions import Call
from ..planned.spans import Carried
from ..planned.updates import Parts
from ..planned.wire import Exchanging
from ..queries import combine_of, digest
from ..routes.group import Group
from ..update.separable import is_elementwise
from .agreement import Agreement, Kind, answer_in_barriers
from .checkpoint import ShardedState
from .ownership import Ownership, refuse_overlaps
from .states import States
from .sums import Row, range_of, row_of

log = logging.getLogger("bytesched")


class Owners:
    """Which ranks own what, and everything that is carried for it (see `terms.Owners`).

    Args:
        group: of Gloo, for statements alone.
        base: of the script, with the same ranks.
        reduced: those whose gradients are summed; each rank updates all others by itself.
        run_bytes: neighbours up to so many have one owner, and travel together.
    """

    def __init__(
        self,
        parts: Parts,
        wire: Exchanging,
        group: Group,
        base: dist.ProcessGroup,
        reduced: Sequence[nn.Parameter],
        *,
        run_bytes: int,
    ) -> None:
        self._wire = wire
        self._reduced = {id(parameter) for parameter in reduced}
        self._slots = [slot for slot in parts.slots if id(slot.parameter) in self._reduced]
        refuse_overlaps(self._slots)
        self._failures = parts.failures
        self._meter = parts.meter
        self.run_bytes = run_bytes
        self.ranks = wire.size
        #: sums of this round that are under way; and what was sent by the last steps
        self._summing: list[Row] = []
        self._rows: list[Row] = []
        #: the optimizer's own ``step()`` is running
        self.is_stepping = False
        self.states = States(self._slots, lambda number: self._agreement.say(Kind.STATE, number))
        self._agreement = Agreement(group, parts.failures, self.states.answer)
        self.leave, self.disown = self._agreement.leave, self._agreement.disown
        self._carried = Carried(parts.observers)
        self._end_barriers = answer_in_barriers(base, self._agreement.barrier_begins)

    # -- who owns what -----------------------------------------------------------------

    @property
    def ownership(self) -> Ownership:
        """Who owns what, after `deal`."""
        assert self.states.ownership is not None
        return self.states.ownership

    def deal(self) -> None:
        if self.states.ownership is not None:
            return
        ownership = Ownership(self.ranks, self._wire.rank, self.run_bytes)
        left = {id(slot.parameter): slot.parameter for slot in self._slots}
        # Where two have had a parameter, it is the later one's.
        for deferred in reversed(self.states.optimizers):
            known = deferred.parameter_ids()
            mine = [left.pop(key) for key in [*left] if key in known]
            ownership.deal(mine, can_cut=is_elementwise(deferred.kind))
        ownership.deal([*left.values()], can_cut=False)
        self.states.dealt(ownership)
        if self._wire.rank == 0 and any(ownership.is_cut(s.parameter) for s in self._slots):
            log.info(
                "with shard=True, norms of tensors of which every rank owns a part are made of the "
                "norms of the parts, which rounds otherwise than plain DDP"
            )

    def is_owned(self, parameter: torch.Tensor) -> bool:
        """Whether some rank updates ``parameter`` for all."""
        return id(parameter) in self._reduced

    def owned(self, member: Member) -> torch.Tensor | None:
        """The memory of the sum of ``member``, as far as it is here; None if nothing is."""
        piece = self.ownership.own(member.parameter)
        if piece is None or not self.ownership.is_cut(member.parameter):
            return None if piece is None else member.view
        start, stop = range_of(member, piece)
        return member.bucket.buffer[start:stop]

    # -- gradients ---------------------------------------------------------------------

    def forward_begins(self) -> None:
        self._agreement.say(Kind.FORWARD)

    def round_begins(self) -> None:
        self._refuse_half_a_step()
        # What was sent before is here: its parameters have been used.
        for row in self._rows:
            row.work = None
        self._rows.clear()
        self._agreement.rounds += 1
        self._carried.round_begins()

    def start(self, bucket: Bucket) -> None:
        row = bucket.row = bucket.row or row_of(bucket, self.ownership, self.ranks)
        bucket.is_with_owners = True
        self._begin(row, partial(row.begin_sum, is_kept=not bucket.holds_gradients))
        self._summing.append(row)
        # What came is added up beside backward, and its memory goes.
        while self._summing and not self._wire.has_streams and self._summing[0].work.is_completed():
            self._add_first()

    def _begin(self, row: Row, begin: Callable[[Exchanging], object]) -> None:
        self._carried.begin(partial(begin, self._wire), row.name, row.nbytes)

    def _finish_sums(self) -> None:
        """Returns when this rank has the sums of all that it owns."""
        while self._summing:
            self._add_first()

    def _add_first(self) -> None:
        row = self._summing.pop(0)
        self._wait(row)
        row.add()

    def _wait(self, row: Row) -> None:
        try:
            self._wire.wait(row.work, row.name)
        except TransportError as error:
            self._failures.raise_first(error)

    def bring(self, buckets: Sequence[Bucket], by: str) -> None:
        if not buckets:
            self._finish_sums()
            return
        began = self._meter.moment()
        self._agreement.say(Kind.READ, digest(str([bucket.chunks[0].index for bucket in buckets])))
        self._finish_sums()
        for bucket in buckets:
            self._begin(bucket.row, bucket.row.begin_spread)
        for bucket in buckets:
            self._wait(bucket.row)
            bucket.row.put()
        self._meter.waited(by, began)

    def measure(self, call: Call) -> list[torch.Tensor] | None:
        """Owners measure, and tell all ranks (see `Ask`)."""
        pieces = [self.ownership.of(member.parameter) for member in call.members]
        combine = combine_of(call.func, call.args, call.kwargs)
        question = call.question()
        if question is None or (combine is None and any(len(some) > 1 for some in pieces)):
            return None

        # What cannot be asked is raised on all ranks, before any of them waits.
        kinds = call.kinds()
        began = self._meter.moment()
        names = ",".join(member.name for member in call.members)
        self._agreement.say(Kind.ASK, digest(f"{question.text} of {names}"))
        self._finish_sums()
        row = torch.zeros(len(pieces), dtype=torch.float64, device="cpu")
        owned = map(self.owned, call.members)
        mine = {at: memory for at, memory in enumerate(owned) if memory is not None}
        try:
            found = question.of([*mine.values()]) if mine else []
        except Exception as error:  # noqa: BLE001 - it is raised here, and ends the others
            self._failures.raise_first(error)
        row[[*mine]] = torch.tensor(found, dtype=row.dtype, device="cpu")
        rows = self._agreement.numbers(row)
        waited_ns = self._meter.waited("norm of all gradients", began)
        self._meter.causes.asked(waited_ns)
        numbers = (
            rows[some[0].rank, at] if len(some) == 1 or combine is None else combine(rows[:, at])
            for at, some in enumerate(pieces)
        )
        return call.answer(numbers, kinds)

    # -- steps -------------------------------------------------------------------------

    def steps(self, optimizer: int, names: Sequence[str], members: Sequence[Member]) -> None:
        """Returns when the sums of ``members``, which a step takes, are with their owners."""
        self._refuse_half_a_step()
        began = self._meter.moment()
        self._agreement.steps += 1
        histories = [member.history for member in members]
        self._agreement.say(Kind.STEP, digest(str((optimizer, names, histories))))
        self._finish_sums()
        self._meter.waited("step", began)

    def _refuse_half_a_step(self) -> None:
        if self.is_stepping:
            self._failures.raise_first(
                PluginError(
                    f"an exception ended step() on rank {self._wire.rank}, and the others wait for "
                    "what it would have updated; unwrap, and wrap again to go on"
                )
            )

    def send(self, row: Row) -> None:
        """Begins to send what this rank owns of ``row``, and to take what others own of it."""
        self._begin(row, row.begin_spread)
        self._rows.append(row)

    @property
    def busy_ns(self) -> int:
        spans = self._carried.spans
        return spans.busy_ns() if spans.is_complete else 0

    # -- other ranks -------------------------------------------------------------------

    def state_of(
        self, optimizer: torch.optim.Optimizer, synchronize: Callable[[], None]
    ) -> ShardedState:
        """What this rank holds of the state of ``optimizer``; see `bytesched.sharded_state`."""
        return ShardedState(optimizer, self.states, synchronize)

    def refuse_late(self) -> None:
        if self.states.ownership is not None:
            raise PluginError(
                "with shard=True, wrap every optimizer of a model before its first backward pass"
            )

    def restore(self) -> None:
        self.states.restore()
        self._end_barriers()

    def close(self) -> None:
        self._end_barriers()
        is_over = self.states.ownership is None or self._failures.error is not None
        if not is_over and not self._agreement.end():
            log.warning("rank %d ends while others go on, or are gone", self._wire.rank)
        self.states.close()

    def let_go(self) -> None:
        works = [row.work for row in (*self._summing, *self._rows) if row.work is not None]
        if not self._wire.has_streams:
            self._wire.wait_left(works)
        for row in self._rows:
            row.let_go()
        self._summing.clear()
        self._rows.clear()
