"""Shards the update of a session, by messages over Gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from bytesched.observe import Observers
from bytesched.task import CommTask
from bytesched.tunable import Setting

from ..dependency.progress import Progress
from ..figures.meter import Meter
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
from ..routes.streams import Streams
from ..zero1.requests import Requests
from ..zero1.sharding import Listener
from .sharded_carrier import Parameters, ShardedCarrier, ShardedExchange

__all__ = ["MessageSharder", "notifier"]

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
        progress: Progress,
        setting: Setting,
        streams: Streams,
        owners: Listener,
        *,
        reduced: Callable[[CommTask], None],
        meter: Meter,
        observers: Observers,
    ) -> ShardedCarrier:
        exchange, parameters, groups = self._summed(
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
            assembled=owners.assembled,
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


def notifier(progress: Progress) -> Callable[[], None]:
    """Wakes who waits for the progress of a session."""

    def notify() -> None:
        with progress.lock:
            progress.notify()

    return notify
