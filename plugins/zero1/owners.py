"""The owners of one session: what they are, and what goes to them and comes from them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn

from bytesched.errors import PluginError, TransportError

from ..layout import is_dense
from ..planned.buckets import Bucket, Member
from ..planned.bundles import Slot
from ..planned.spans import Carried
from ..planned.updates import Parts
from ..planned.wire import Exchanging
from ..queries import digest
from ..routes.group import Group
from ..update.separable import is_elementwise
from .agreement import Agreement, Kind, answer_in_barriers
from .checkpoint import ShardedState
from .ownership import Ownership
from .questions import OwnersQuestions
from .states import States
from .sums import BucketRow, Row, range_of

log = logging.getLogger("bytesched")


class Owners:
    """Which ranks own what, and everything that is carried for it.

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
        _refuse_overlaps(self._slots)
        self._failures = parts.failures
        self._meter = parts.meter
        self.run_bytes = run_bytes
        self.ranks = wire.size
        #: of this round, whose sums are under way; and of parameters, since the last steps
        self._summing: list[BucketRow] = []
        self._rows: list[Row] = []
        #: the optimizer's own ``step()`` is running
        self.is_stepping = False
        self.states = States(self._slots, lambda number: self._agreement.say(Kind.STATE, number))
        self._agreement = Agreement(group, parts.failures, self.states.answer)
        self.leave, self.disown = self._agreement.leave, self._agreement.disown
        self._carried = Carried(parts.observers)
        self.questions = OwnersQuestions(
            wire.rank,
            self.owned,
            lambda member: [piece.rank for piece in self.ownership.of(member.parameter)],
            self._numbers,
        )
        self._end_barriers = answer_in_barriers(base, self._agreement.barrier_begins)

    # -- who owns what -----------------------------------------------------------------

    @property
    def ownership(self) -> Ownership:
        """Who owns what, after `deal`."""
        assert self.states.ownership is not None
        return self.states.ownership

    def deal(self) -> None:
        """Every parameter has its owners from now on: all optimizers are known. Idempotent."""
        if self.states.ownership is not None:
            return
        kinds = [-1] * len(self._slots)
        may_cut = [False] * len(self._slots)
        for number, deferred in enumerate(self.states.optimizers):
            mine = deferred.parameter_ids()
            for at, slot in enumerate(self._slots):
                if id(slot.parameter) in mine:
                    kinds[at] = number
                    may_cut[at] = is_elementwise(deferred.kind) and is_dense(slot.parameter)
        ownership = Ownership(
            self._slots,
            kinds,
            may_cut,
            ranks=self.ranks,
            rank=self._wire.rank,
            run_bytes=self.run_bytes,
        )
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
        """A forward pass begins in which DDP waits for all: who asks for a state is answered."""
        self._agreement.say(Kind.FORWARD)

    def round_begins(self) -> None:
        """The first bucket of a round is ready. In a hook of the reducer: nothing waits."""
        self._refuse_half_a_step()
        # What was sent before is here: its parameters have been used.
        for row in self._rows:
            row.work = None
        self._rows.clear()
        self._agreement.rounds += 1
        self._carried.round_begins()

    def start(self, bucket: Bucket) -> None:
        """The sums of ``bucket`` go to their owners. In a hook of the reducer: nothing waits."""
        row: BucketRow = bucket.row or BucketRow(bucket, self.ownership, self.ranks)
        bucket.row, bucket.is_with_owners = row, True
        self._carried.begin(partial(row.begin_sum, self._wire), row.name, row.nbytes)
        self._summing.append(row)
        # What came is added up beside backward, and its memory goes.
        while self._summing and not self._wire.has_streams and self._summing[0].work.is_completed():
            self._add_first()

    def _finish_sums(self) -> None:
        """Returns when this rank has the sums of all that it owns."""
        while self._summing:
            self._add_first()

    def _add_first(self) -> None:
        row = self._summing.pop(0)
        self._wait(row)
        row.add()

    def _wait(self, row: BucketRow) -> None:
        try:
            self._wire.wait(row.work, row.name)
        except TransportError as error:
            self._failures.raise_first(error)

    def bring(self, buckets: Sequence[Bucket], by: str) -> None:
        """Returns when no sum is under way, and those of ``buckets`` are here; collective."""
        if not buckets:
            self._finish_sums()
            return
        began = self._meter.moment()
        self._agreement.say(Kind.READ, digest(str([bucket.chunks[0].index for bucket in buckets])))
        self._finish_sums()
        for bucket in buckets:
            begin = partial(bucket.row.begin_return, self._wire)
            self._carried.begin(begin, bucket.row.name, bucket.row.nbytes)
        for bucket in buckets:
            self._wait(bucket.row)
            bucket.row.put()
        self._meter.waited(by, began)

    def _numbers(self, text: str, measured: Callable[[], torch.Tensor]) -> torch.Tensor:
        began = self._meter.moment()
        self._agreement.say(Kind.ASK, digest(text))
        self._finish_sums()
        try:
            mine = measured()
        except Exception as error:  # noqa: BLE001 - it is raised here, and ends the others
            self._failures.raise_first(error)
        numbers = self._agreement.numbers(mine)
        waited_ns = self._meter.waited("norm of all gradients", began)
        self._meter.causes.asked(waited_ns)
        return numbers

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

    def send(self, row: Row, mine: Sequence[torch.Tensor]) -> None:
        """Begins to send ``mine`` of ``row``, and to take what others own of it."""
        self._carried.begin(partial(row.begin, self._wire, mine), row.name, row.nbytes)
        self._rows.append(row)

    @property
    def busy_ns(self) -> int:
        """For how long something was under way in the last round; 0: not known."""
        spans = self._carried.spans
        return spans.busy_ns() if spans.is_complete else 0

    # -- other ranks -------------------------------------------------------------------

    def state_of(
        self, optimizer: torch.optim.Optimizer, synchronize: Callable[[], None]
    ) -> ShardedState:
        """What this rank holds of the state of ``optimizer``; see `bytesched.sharded_state`."""
        return ShardedState(optimizer, self.states, synchronize)

    def refuse_late(self) -> None:
        """Raises `PluginError` where an optimizer comes too late to be dealt with."""
        if self.states.ownership is not None:
            raise PluginError(
                "with shard=True, wrap every optimizer of a model before its first backward pass"
            )

    def restore(self) -> None:
        """Optimizers get the state that other ranks hold: from here on they are ordinary ones."""
        self.states.restore()
        self._end_barriers()

    def close(self) -> None:
        """Returns when no other rank needs anything of this one any more."""
        self._end_barriers()
        is_over = self.states.ownership is None or self._failures.error is not None
        if not is_over and not self._agreement.end():
            log.warning("rank %d ends while others go on, or are gone", self._wire.rank)
        self.states.close()

    def let_go(self) -> None:
        """Nothing is under way any more: works keep connections open."""
        rows: list[BucketRow | Row] = [*self._summing, *self._rows]
        if not self._wire.has_streams:
            self._wire.wait_left([row.work for row in rows if row.work is not None])
        for row in self._rows:
            row.let_go()
        self._summing.clear()
        self._rows.clear()


def _refuse_overlaps(slots: Sequence[Slot]) -> None:
    """Raises `PluginError` where memory would have two owners."""
    placed = sorted((s.parameter.data_ptr(), s.parameter.nbytes, s.name) for s in slots)
    placed = [one for one in placed if one[1]]
    for (start, nbytes, name), (other_start, _, other) in pairwise(placed):
        if other_start < start + nbytes:
            raise PluginError(
                f"shard = True: parameters {name!r} and {other!r} are over one memory, which would "
                "have two owners; make them one Parameter"
            )
