"""Which ranks have the same stages: those that average their gradients."""

from __future__ import annotations

import json
import time
from typing import Any, Final

import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from bytesched.errors import MismatchError, PluginError, SchedulerTimeout

from ..layout.digest import digest_of
from ..routes.groups.group import Group
from ..routes.groups.opening import store_of
from .root import StageModules

__all__ = ["named_replicas", "refuse_other_values", "replicas_of"]

_SHORTEST_NAP_S: Final = 1e-3
_LONGEST_NAP_S: Final = 0.05


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


def replicas_of(root: StageModules, timeout_s: float) -> dist.ProcessGroup:
    """The group of all ranks of the job that have the stages of this one; made if need be.

    Collective over the job: every rank says which stages it has.

    Raises `SchedulerTimeout` if some rank does not come, and `MismatchError` on all of them if
    stages do not lie on ranks in the same way in every pipeline.
    """
    world = distributed_c10d._get_default_group()
    store = store_of(world)
    rank, size = world.rank(), world.size()
    number = store.add(f"bytesched/pipelines/{rank}", 1)
    said = distributed_c10d.PrefixStore(f"bytesched/pipeline{number}", store)
    stages = root.schedule.stages
    mine = json.dumps([stages[0].num_stages, [stage.stage_index for stage in stages]])
    said.set(str(rank), mine)
    said.add("count", 1)
    _wait_for_all(said, rank, size, timeout_s)
    texts = [said.get(str(r)).decode() for r in range(size)]
    _refuse_other_placements([json.loads(text) for text in texts])
    if len(set(texts)) == 1:
        return world
    # Every rank takes part in the making of every group, and in one order.
    groups: dict[str, Any] = {
        text: dist.new_group([r for r in range(size) if texts[r] == text])
        for text in dict.fromkeys(texts)
    }
    own = groups[mine]
    assert isinstance(own, dist.ProcessGroup)
    return own


def _refuse_other_placements(said: list[tuple[int, list[int]]]) -> None:
    """``said``: of each rank, how many stages there are, and which it has."""
    for rank, (count, stages) in enumerate(said):
        for other, (other_count, theirs) in enumerate(said):
            if count != other_count or (set(stages) & set(theirs) and stages != theirs):
                raise MismatchError(
                    f"rank {rank} has stages {_text(stages)} of {count}, rank {other} stages "
                    f"{_text(theirs)} of {other_count}: in every pipeline, stages are to lie on "
                    "ranks in the same way; or, if it is meant, name the ranks that have the same "
                    "ones (groups=GROUP)"
                )


def refuse_other_values(root: nn.Module, control: Group) -> None:
    """Raises `MismatchError` on all ranks unless they begin with equal parameters; collective.

    Ranks that have the same stages need not be replicas: each may have a part of every tensor.
    """
    digests = control.gather_text("values", digest_of(root.parameters()))
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        first, other = control.members[0], control.members[others[0]]
        raise MismatchError(
            f"replicas {first} and {other} of {type(root).__name__} have the same stages and begin "
            "with different values: give them the same, or, if they are no replicas, name the "
            "process group of those that are (groups=GROUP)"
        )


def _wait_for_all(
    said: distributed_c10d.PrefixStore, rank: int, size: int, timeout_s: float
) -> None:
    began_s, nap_s = time.monotonic(), _SHORTEST_NAP_S
    while said.add("count", 0) < size:
        if time.monotonic() - began_s > timeout_s:
            missing = ", ".join(str(r) for r in range(size) if not said.check([str(r)]))
            raise SchedulerTimeout(
                f"rank {missing} did not say within {timeout_s:g} s which stages it has: every "
                "rank of the job is to wrap its schedule, or name its replicas (groups=GROUP)",
                rank=rank,
            )
        time.sleep(nap_s)
        nap_s = min(2 * nap_s, _LONGEST_NAP_S)


def _text(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
