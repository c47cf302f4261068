"""Which ranks have the same stages: those that average their gradients."""

from __future__ import annotations

import json
from typing import Any, Final

import torch.distributed as dist
from torch.distributed import distributed_c10d

from bytesched.errors import MismatchError, PluginError, SchedulerTimeout

from ..agree import disagreement
from ..layout import digest_of
from ..routes.opening import store_of
from ..routes.store import await_keys
from .root import StageModules


def named_replicas(root: StageModules, groups: Any) -> dist.ProcessGroup | None:
    """The group that ``groups`` is, or DDP has been given for the stages; None if nobody says it.

    Raises `PluginError` for anything else, or if stages are in different groups.
    """
    if groups:
        if not isinstance(groups, dist.ProcessGroup):
            raise PluginError(
                f"groups is a {type(groups).__name__}: for a pipeline it is the process group of "
                "the ranks that have the same stages"
            )
        named = [groups]
    else:
        named = []
    ddps = root.ddps()
    if ddps and len(ddps) < len(root.schedule.stages):
        raise PluginError(
            f"{len(ddps)} of {len(root.schedule.stages)} stages on rank {dist.get_rank()} are in a "
            "DistributedDataParallel: put all of them in one, or none"
        )
    named += [ddp.process_group for ddp in ddps]
    members = {tuple(dist.get_process_group_ranks(group)) for group in named}
    if len(members) > 1:
        raise PluginError(
            f"stages on rank {dist.get_rank()} are reduced over different ranks: "
            f"{', '.join(map(str, sorted(members)))}"
        )
    return named[0] if named else None


#: the key that is set when all ranks have said what they have
_ALL: Final = "all"


class RollCall:
    """One at which every rank of the job says which stages it has, or why it does not wrap them.

    The n-th of each rank are one. So ranks that differ are known to all, and none waits for them.
    """

    def __init__(self) -> None:
        world = distributed_c10d._get_default_group()
        store = store_of(world)
        self._world = world
        self._rank, self._size = world.rank(), world.size()
        # Counted in the store: the group of a later training has a new one.
        number = store.add(f"bytesched/pipelines/{self._rank}", 1)
        self._said = distributed_c10d.PrefixStore(f"bytesched/pipeline{number}", store)

    def decline(self, why: str) -> None:
        """The other ranks raise, with this one's reason ``why``."""
        self._say({"why": why})

    def replicas(self, root: StageModules, timeout_s: float) -> dist.ProcessGroup:
        """The group of all ranks that have the stages of this one; made if need be. Collective.

        Ranks that have the same stages need not be replicas: each may have a part of every tensor.
        So they are to begin with the same values.

        Raises `SchedulerTimeout` if some rank does not come, and `MismatchError` on all of them if
        one declines, or has other values, or stages elsewhere or in another order.
        """
        stages = root.schedule.stages
        indices = [stage.stage_index for stage in stages]
        self._say(
            {
                "stages": [stages[0].num_stages, indices],
                "plan": root.schedule.statements(),
                "values": digest_of(root.parameters()),
            }
        )
        try:
            await_keys(self._said, [_ALL], timeout_s, lambda: None)
        except dist.DistStoreError:
            silent = [r for r in range(self._size) if not self._said.check([str(r)])]
            raise SchedulerTimeout(
                f"rank {_text(silent)} did not say within {timeout_s:g} s which stages it "
                "has: every rank of the job is to wrap its schedule, or name its replicas "
                "(groups=GROUP)",
                rank=self._rank,
            ) from None
        said = [json.loads(self._said.get(str(rank))) for rank in range(self._size)]
        _refuse_disagreement(said, self._rank)
        keys = [tuple(each["stages"][1]) for each in said]
        if len(set(keys)) == 1:
            return self._world
        # Every rank takes part in the making of every group, and in one order.
        groups: dict[tuple[int, ...], Any] = {
            key: dist.new_group([rank for rank in range(self._size) if keys[rank] == key])
            for key in dict.fromkeys(keys)
        }
        own = groups[tuple(indices)]
        assert isinstance(own, dist.ProcessGroup)
        return own

    def _say(self, what: dict[str, Any]) -> None:
        self._said.set(str(self._rank), json.dumps(what))
        if self._said.add("count", 1) == self._size:
            self._said.set(_ALL, "")


def _refuse_disagreement(said: list[dict[str, Any]], seen_by: int) -> None:
    for rank, each in enumerate(said):
        if "why" in each:
            raise MismatchError(f"rank {rank} does not wrap: {each['why']}")
    for rank, each in enumerate(said):
        count, stages = each["stages"]
        for other in range(rank):
            other_count, theirs = said[other]["stages"]
            if count != other_count or (set(stages) & set(theirs) and stages != theirs):
                raise MismatchError(
                    f"rank {other} has stages {_text(theirs)} of {other_count}, rank {rank} has "
                    f"stages {_text(stages)} of {count}: in every pipeline, stages are to lie on "
                    "ranks in the same way; or, if it is meant, name the ranks that have the same "
                    "ones (groups=GROUP)"
                )
        others = [r for r in range(rank) if said[r]["stages"] == each["stages"]]
        if others and said[others[0]]["values"] != each["values"]:
            raise MismatchError(
                f"ranks {others[0]} and {rank} have stages {_text(stages)} and begin with "
                "different values: give them the same; or, if they are no replicas, name the ranks "
                "that are (groups=GROUP)"
            )
    if why := disagreement({rank: each["plan"] for rank, each in enumerate(said)}, seen_by):
        raise MismatchError(why)


def _text(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
