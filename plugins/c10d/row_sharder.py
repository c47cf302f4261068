"""Shards the update of a session, by reduce-scatter and all-gather."""

from __future__ import annotations

from collections.abc import Callable

from bytesched.observe import Observers
from bytesched.task import CommTask
from bytesched.tunable import Setting

from ..dependency.progress import Progress
from ..layout.packing import Packer
from ..layout.plan import Plan
from ..routes.groups.group import Group
from ..routes.split.sharded_rows import RowParameters, ShardedRows
from ..routes.streams import Streams
from ..zero1.sharding import Listener
from .sharded_carrier import Parameters, ShardedExchange
from .sharder import MessageSharder, notifier

__all__ = ["RowSharder"]


class RowSharder(MessageSharder):
    """See sharding.Sharder. Owners are those of messages; answers still travel over Gloo.

    Args:
        ranks: how many there are.
        open_group: opens a group for a purpose, of a kind, "gloo" or "nccl"; collective.
        close_group: closes it.
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
        progress: Progress,
        setting: Setting,
        streams: Streams,
        owners: Listener,
        *,
        reduced: Callable[[CommTask], None],
        observers: Observers,
    ) -> tuple[ShardedExchange, Parameters, list[Group]]:
        group, control = self._open_group("rows", self._kind), self._open_group("control", "gloo")
        exchange = ShardedRows(
            group,
            control,
            plan,
            packer,
            setting,
            streams,
            reduced=reduced,
            summed=notifier(progress),
            failed=progress.fail,
            observers=observers,
        )
        parameters = RowParameters(
            exchange, plan, streams, spread=owners.spread, gathered=owners.gathered
        )
        return exchange, parameters, [group, control]
