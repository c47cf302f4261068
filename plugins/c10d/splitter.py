"""Splits what a session sends by exchanging slices over Gloo."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, Protocol

import torch

from bytesched.errors import BytesschedError
from bytesched.observe import Observers
from bytesched.task import CommTask
from bytesched.tunable import Setting

from ..dependency.progress import Progress
from ..figures.meter import Meter
from ..layout.packing import Packer
from ..layout.plan import Ownership, Plan
from ..queries.answers import Answers
from ..queries.expressions import Asked
from ..queries.gradient_queries import GradientQueries
from ..queries.parts import EXACT_PARTS, Places
from ..routes.carrier import Traffic
from ..routes.groups.group import Group
from ..routes.groups.sockets import short_queues
from ..routes.split.exchange import Exchange
from ..routes.split.owners import (
    bounds_of,
    has_parts,
    large_ones,
    late_ones,
    owners_of,
    owners_or_cuts,
)
from ..routes.split.parameters import ParameterSpread
from ..routes.split.turns import Sent
from ..routes.streams import Streams
from ..zero1.lockstep import Place
from ..zero1.requests import Requests
from ..zero1.sharding import Listener
from ..zero1.spreading import SpreadCarrier

__all__ = [
    "ExchangeCarrier",
    "ExchangeSplitter",
    "Parameters",
    "ShardedCarrier",
    "ShardedExchange",
    "SplitExchange",
    "notifier",
]

#: of one connection: enough for a link of 10 Gbit/s over 100 microseconds
_UNSENT_BYTES: Final = 128 << 10


class SplitExchange(Protocol):
    """One rank's part in the two hops of every chunk, by messages or by collectives."""

    @property
    def order(self) -> str:
        """How the ranks come to one order, for ``stats()``."""

    @property
    def traffic(self) -> Traffic:
        """What has been carried so far."""

    @property
    def is_summed(self) -> bool:
        """Whether the sums of this round that this rank measures are in the arena."""

    def begin_round(self) -> None:
        """A new backward pass begins, and nothing is under way. Raises an error of ours."""

    def submit(self, chunk: CommTask) -> None:
        """The gradients of ``chunk``, which is READY, are there."""

    def lost(self) -> BaseException | None:
        """The error of something that is waited for and cannot come, if there is one."""

    def story(self) -> str:
        """The last events, for the message of an error."""

    def close(self) -> None:
        """Ends threads; what is under way fails. Idempotent."""


class ShardedExchange(SplitExchange, Protocol):
    """The first hop of every chunk, where owners update what they have summed."""

    @property
    def may_tell(self) -> bool:
        """Whether any rank measures what others own; the same on all ranks."""

    def tell_measurers(self, tells: bool) -> None:
        """From the round on that begins next, owners send their sums to who measures them."""

    def is_told(self, chunks: Iterable[CommTask]) -> bool:
        """Whether the sums of this round that others own of ``chunks`` come in phase one."""

    def close(self, *, is_idle: bool = True) -> None:
        """Ends threads; with ``is_idle``, what shares them has nothing under way."""


class Parameters(SpreadCarrier, Protocol):
    """The second hop of a sharded update."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""

    def begin_round(self) -> None:
        """A new backward pass begins."""

    def close(self) -> None:
        """Wakes who waits for memory. Idempotent."""


class ExchangeSplitter:
    """See splitting.Splitter.

    Args:
        ranks: how many there are.
        open_group: opens a group for a purpose, of a kind, "gloo" or "nccl"; collective.
        close_group: closes it.
    """

    def __init__(
        self,
        ranks: int,
        open_group: Callable[[str, str], Group],
        close_group: Callable[[Group], None],
    ) -> None:
        self._ranks = ranks
        self._open_group = open_group
        self._close_group = close_group

    def cut(self, plan: Plan, partition_bytes: int) -> None:
        partition_bytes = self._chunk_bytes(partition_bytes)
        nbytes = [slot.view.nbytes for slot in plan.slots]
        late = late_ones(nbytes, self._ranks, partition_bytes)
        owners = owners_of(nbytes, self._ranks, partition_bytes, late)
        # No parts: whoever takes a norm, of all ranks or of one that asks alone, has the same bits.
        self._cut(plan, partition_bytes, owners, ())

    def cut_for_owners(
        self, plan: Plan, partition_bytes: int, kinds: Sequence[int], may_cut: Sequence[bool]
    ) -> None:
        partition_bytes = self._chunk_bytes(partition_bytes)
        nbytes = [slot.view.nbytes for slot in plan.slots]
        may_cut = [
            may and has_parts(slot.view.numel(), self._ranks)
            for may, slot in zip(may_cut, plan.slots, strict=True)
        ]
        unfit = late_ones if self._ranks <= EXACT_PARTS else large_ones
        cut = {at for at in unfit(nbytes, self._ranks, partition_bytes) if may_cut[at]}
        owners = owners_or_cuts(nbytes, kinds, may_cut, self._ranks, partition_bytes, cut)
        in_parts = [position for position, owner in enumerate(owners) if owner is None]
        self._cut(plan, partition_bytes, owners, in_parts, kinds)

    def _chunk_bytes(self, partition_bytes: int) -> int:
        """What its owner's link carries in the time that an all-reduce of a partition takes."""
        return max(1, 2 * partition_bytes // self._ranks)

    def _cut(
        self,
        plan: Plan,
        partition_bytes: int,
        owners: Sequence[int | None],
        in_parts: Iterable[int],
        kinds: Sequence[int] = (),
    ) -> None:
        bounds = {at: bounds_of(plan.slots[at].view.numel(), self._ranks) for at in in_parts}
        plan.cut(partition_bytes, Ownership(self._ranks, owners, kinds, bounds))

    def carrier(
        self,
        plan: Plan,
        packer: Packer,
        progress: Progress,
        setting: Setting,
        streams: Streams,
        *,
        reduced: Callable[[CommTask], None],
        meter: Meter,
        observers: Observers,
    ) -> ExchangeCarrier:
        exchange, groups = self._summed(
            plan, packer, progress, setting, streams, reduced=reduced, observers=observers
        )
        others, answers = self._open_answers(plan, progress)

        def is_whole() -> bool:
            return not progress.outstanding

        queries = GradientQueries(
            plan,
            others.rank,
            exchange,
            answers,
            progress,
            meter,
            is_whole=is_whole,
            assembled=None,
            is_told=lambda _: False,
            lend=streams.lend,
        )
        return ExchangeCarrier(
            exchange,
            answers,
            queries,
            [*groups, others],
            failed=partial(progress.fail, is_raised=True),
            closed=self._close_group,
        )

    def sharded(
        self,
        plan: Plan,
        packer: Packer,
        progress: Progress,
        setting: Setting,
        streams: Streams,
        owners: Listener,
        *,
        reduced: Callable[[CommTask], None],
        meter: Meter,
        observers: Observers,
    ) -> ShardedCarrier:
        exchange, parameters, groups = self._summed_for_owners(
            plan, packer, progress, setting, streams, owners, reduced=reduced, observers=observers
        )
        others, answers = self._open_answers(plan, progress)
        requests = Requests(others, asked=owners.asked, heard=owners.heard, failed=progress.fail)
        queries = GradientQueries(
            plan,
            others.rank,
            exchange,
            answers,
            progress,
            meter,
            is_whole=_never,
            assembled=owners.assembled,
            is_told=lambda slot: exchange.is_told(slot.chunks),
            lend=streams.lend,
        )
        return ShardedCarrier(
            exchange,
            parameters,
            answers,
            requests,
            queries,
            [*groups, others],
            failed=partial(progress.fail, is_raised=True),
            closed=self._close_group,
        )

    def _summed(
        self,
        plan: Plan,
        packer: Packer,
        progress: Progress,
        setting: Setting,
        streams: Streams,
        *,
        reduced: Callable[[CommTask], None],
        observers: Observers,
    ) -> tuple[SplitExchange, list[Group]]:
        """What sums and spreads, and the groups that it uses; collective."""
        group = self._open_exchange()
        exchange = Exchange(
            group,
            plan,
            packer,
            setting,
            reduced=reduced,
            summed=notifier(progress),
            failed=progress.fail,
            observers=observers,
        )
        return exchange, [group]

    def _summed_for_owners(
        self,
        plan: Plan,
        packer: Packer,
        progress: Progress,
        setting: Setting,
        streams: Streams,
        owners: Listener,
        *,
        reduced: Callable[[CommTask], None],
        observers: Observers,
    ) -> tuple[ShardedExchange, Parameters, list[Group]]:
        """What sums, what spreads parameters, and the groups that they use; collective."""
        group = self._open_exchange()
        exchange = Exchange(
            group,
            plan,
            packer,
            setting,
            is_spread=lambda chunk: chunk.index in plan.shared,
            measurers=_measurers(plan, packer),
            reduced=reduced,
            summed=notifier(progress),
            failed=progress.fail,
            observers=observers,
        )
        parameters = ParameterSpread(exchange, plan, spread=owners.spread, gathered=owners.gathered)
        return exchange, parameters, [group]

    def _open_answers(self, plan: Plan, progress: Progress) -> tuple[Group, Answers]:
        group = self._open_group("messages", "gloo")
        notify, failed = notifier(progress), progress.fail
        return group, Answers(group, Places(plan).count, arrived=notify, failed=failed)

    def _open_exchange(self) -> Group:
        with short_queues(_UNSENT_BYTES):
            return self._open_group("exchange", "gloo")


def _measurers(plan: Plan, packer: Packer) -> dict[int, int]:
    """Who measures each chunk, by index, where that is not its owner."""
    return {
        chunk.index: measurer
        for chunk in plan.chunks
        if (measurer := plan.measurer_of(chunk)) is not None
        # What is rounded on its way is not what its owner has.
        and packer.memory(chunk) is plan.buffers[chunk.index]
    }


def notifier(progress: Progress) -> Callable[[], None]:
    """Wakes who waits for the progress of a session."""

    def notify() -> None:
        with progress.lock:
            progress.notify()

    return notify


def _never() -> bool:
    return False


class ExchangeCarrier:
    """See splitting.SplitCarrier.

    Args:
        answers: to what is asked of gradients, which no chunk on the wire holds up.
        groups: of both; only this carrier uses them.
        failed: called with an error that is raised in the user's thread.
        closed: called with each group when nothing of it is used any more.
    """

    def __init__(
        self,
        exchange: SplitExchange,
        answers: Answers,
        queries: GradientQueries,
        groups: Sequence[Group],
        *,
        failed: Callable[[BaseException], None],
        closed: Callable[[Group], None],
    ) -> None:
        self._exchange = exchange
        self._failed = failed
        self._answers = answers
        self.queries = queries
        self._groups = groups
        self._give_back = closed
        self._closed = False

    @property
    def order(self) -> str:
        return self._exchange.order

    @property
    def traffic(self) -> Traffic:
        return self._exchange.traffic

    @property
    def asked(self) -> Asked:
        return self.queries.asked

    def begin_round(self) -> None:
        try:
            self._exchange.begin_round()
        except BytesschedError as error:
            # The other ranks learn of it, as they take part in it.
            self._failed(error)
            raise
        self.queries.begin_round()

    def backward_ends(self) -> None:
        self.queries.backward_ends()

    def lost(self) -> BaseException | None:
        return self._exchange.lost() or self._answers.lost()

    def submit(self, chunk: CommTask) -> None:
        self._exchange.submit(chunk)

    def change(self, setting: Setting) -> None:
        """Sizes are those of the cut; a window per rank takes the place of credit."""

    def story(self) -> str:
        return self._exchange.story()

    def end_round(self) -> None:
        self._answers.end_round()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        # Without it others would wait for more; after an error they do not.
        with contextlib.suppress(BytesschedError):
            self._answers.end_round()
        self._close_exchange()
        self._answers.close()
        for group in self._groups:
            self._give_back(group)

    def _close_exchange(self) -> None:
        self._exchange.close()


class ShardedCarrier(ExchangeCarrier):
    """See sharding.ShardedCarrier."""

    def __init__(
        self,
        exchange: ShardedExchange,
        parameters: Parameters,
        answers: Answers,
        requests: Requests,
        queries: GradientQueries,
        groups: Sequence[Group],
        *,
        failed: Callable[[BaseException], None],
        closed: Callable[[Group], None],
    ) -> None:
        super().__init__(exchange, answers, queries, groups, failed=failed, closed=closed)
        self._sums = exchange
        self._parameters = parameters
        self._requests = requests

    def lost(self) -> BaseException | None:
        return super().lost() or self._requests.lost()

    def begin_round(self) -> None:
        super().begin_round()
        self._parameters.begin_round()

    def arm(
        self, turn: int, leaving: Sequence[CommTask], coming: Mapping[CommTask, Sequence[slice]]
    ) -> None:
        self._parameters.arm(turn, leaving, coming)

    def expect(self, chunks: Iterable[CommTask], sent: Sent) -> None:
        self._parameters.expect(chunks, sent)

    def stage(self, chunk: CommTask, turn: int) -> torch.Tensor:
        return self._parameters.stage(chunk, turn)

    def spread(self, chunk: CommTask, turn: int) -> None:
        self._parameters.spread(chunk, turn)

    @property
    def may_tell(self) -> bool:
        return self._sums.may_tell

    def tell_measurers(self, tells: bool) -> None:
        self._sums.tell_measurers(tells)

    @property
    def measured_whole(self) -> bool:
        return self.queries.measured_whole

    def ask(self, questions: Mapping[int, bytes], *, task: str) -> Iterator[tuple[int, bytes]]:
        return self._requests.ask(questions, task=task)

    def answer(self, rank: int, answer: bytes) -> None:
        self._requests.answer(rank, answer)

    def announce(self, place: Place, is_last: bool) -> None:
        self._requests.announce(place, is_last)

    def leave(self, limit_s: float) -> list[int]:
        return self._requests.wait_ended(limit_s)

    def close(self) -> None:
        self._requests.close()
        super().close()

    def _close_exchange(self) -> None:
        self._parameters.close()
        self._sums.close(is_idle=self._parameters.is_idle)
