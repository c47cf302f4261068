"""Shards the update of a session: by messages over Gloo, or by collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from bytesched.task import CommTask
from bytesched.tunable import Setting

from ..dependency.context import Context
from ..dependency.progress import Progress
from ..layout.packing import Packer
from ..layout.plan import Ownership, Plan
from ..queries.answers import Answers
from ..queries.gradient_queries import GradientQueries
from ..queries.parts import EXACT_PARTS, Places
from ..routes.groups.group import Group
from ..routes.groups.sockets import short_queues
from ..routes.split.exchange import Exchange
from ..routes.split.owners import (
    bounds_of,
    has_parts,
    large_ones,
    late_ones,
    owners_or_cuts,
)
from ..routes.split.parameters import ParameterSpread
from ..routes.split.sharded_rows import RowParameters, ShardedRows
from ..zero1.requests import Requests
from ..zero1.sharding import Listener
from .sharded_carrier import Parameters, ShardedCarrier, ShardedExchange

__all__ = ["MessageSharder", "RowSharder"]

#: of one connection: enough for a link of 10 Gbit/s over 100 microseconds
_UNSENT_BYTES: Final = 128 << 10


class MessageSharder:
    """See sharding.Sharder.

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

    def cut(
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
        bounds = {at: bounds_of(plan.slots[at].view.numel(), self._ranks) for at in in_parts}
        plan.cut(partition_bytes, Ownership(self._ranks, owners, kinds, bounds))

    def _chunk_bytes(self, partition_bytes: int) -> int:
        """What its owner's link carries in the time that an all-reduce of a partition takes."""
        return max(1, 2 * partition_bytes // self._ranks)

    def carrier(
        self,
        plan: Plan,
        packer: Packer,
        context: Context,
        setting: Setting,
        owners: Listener,
        *,
        reduced: Callable[[CommTask], None],
    ) -> ShardedCarrier:
        progress = context.progress
        exchange, parameters, groups = self._summed(plan, packer, context, setting, owners, reduced)
        others, answers = self._open_answers(plan, progress)
        requests = Requests(others, asked=owners.asked, heard=owners.heard, failed=progress.fail)
        queries = GradientQueries(
            plan,
            others.rank,
            exchange,
            answers,
            progress,
            context.meter,
            assembled=owners.assembled,
            lend=context.streams.lend,
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
        context: Context,
        setting: Setting,
        owners: Listener,
        reduced: Callable[[CommTask], None],
    ) -> tuple[ShardedExchange, Parameters, list[Group]]:
        """What sums, what spreads parameters, and the groups that they use; collective."""
        with short_queues(_UNSENT_BYTES):
            group = self._open_group("exchange", "gloo")
        exchange = Exchange(
            group,
            plan,
            packer,
            setting,
            reduced=reduced,
            summed=_notifier(context.progress),
            failed=context.progress.fail,
            observers=context.observers,
        )
        parameters = ParameterSpread(exchange, plan, spread=owners.spread, gathered=owners.gathered)
        return exchange, parameters, [group]

    def _open_answers(self, plan: Plan, progress: Progress) -> tuple[Group, Answers]:
        group = self._open_group("messages", "gloo")
        notify, failed = _notifier(progress), progress.fail
        return group, Answers(group, Places(plan).count, arrived=notify, failed=failed)


class RowSharder(MessageSharder):
    """By reduce-scatter and all-gather of rows; answers still travel over Gloo.

    Args:
        kind: what carries rows.
    """

    def __init__(
        self,
        ranks: int,
        open_group: Callable[[str, str], Group],
        close_group: Callable[[Group], None],
        kind: str,
    ) -> None:
        super().__init__(ranks, open_group, close_group)
        self._kind = kind

    def _summed(
        self,
        plan: Plan,
        packer: Packer,
        context: Context,
        setting: Setting,
        owners: Listener,
        reduced: Callable[[CommTask], None],
    ) -> tuple[ShardedExchange, Parameters, list[Group]]:
        group, control = self._open_group("rows", self._kind), self._open_group("control", "gloo")
        streams = context.streams
        exchange = ShardedRows(
            group,
            control,
            plan,
            packer,
            setting,
            streams,
            reduced=reduced,
            summed=_notifier(context.progress),
            failed=context.progress.fail,
            observers=context.observers,
        )
        parameters = RowParameters(
            exchange, plan, streams, spread=owners.spread, gathered=owners.gathered
        )
        return exchange, parameters, [group, control]


def _notifier(progress: Progress) -> Callable[[], None]:
    """Wakes who waits for the progress of a session."""

    def notify() -> None:
        with progress.lock:
            progress.notify()

    return notify
