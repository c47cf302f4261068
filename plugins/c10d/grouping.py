"""Parameters that some ranks reduce among themselves: which, over which ranks, and whether the
ranks agree on it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bytesched.errors import MismatchError, PluginError

from ..layout import digest_of
from ..planned.bundles import Slot
from ..planned.hooked_session import HookedSession
from ..planned.session import PlannedSession
from ..planned.wire import Partition, Summing
from ..routes.group import Group
from .shell import ignored_by

__all__ = [
    "Grouping",
    "grouping_of",
    "has_groups",
    "partitions_of",
    "refuse_other_groups",
    "refuse_reduced",
    "statements",
]

#: of a module: the process group over which gradients of all parameters below it are reduced, or
#: None: over no other rank
ATTRIBUTE: Final = "data_parallel_group"


@dataclass(frozen=True)
class Grouping:
    """Which ranks of the user's group reduce which parameters; the others are reduced by all."""

    #: how many ranks there are
    size: int
    #: by the id of a parameter or buffer
    ranks: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def ids(self) -> Set[int]:
        """Of everything that is in a group, be it of all ranks."""
        return self.ranks.keys()

    @property
    def parted(self) -> Set[int]:
        """The ids of what not all ranks reduce."""
        return {key for key, ranks in self.ranks.items() if len(ranks) < self.size}

    def suits(self, ddp: DistributedDataParallel | None) -> bool:
        """Whether ``ddp``, or who averages over all ranks, can do with it."""
        left_out = () if ddp is None else ignored_by(ddp)
        return not self.parted and all(id(p) not in self.ids for p in left_out)

    def of(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """The ranks that reduce ``tensor``."""
        return self.ranks.get(id(tensor), tuple(range(self.size)))

    def divisions(self, slots: Sequence[Slot]) -> dict[tuple[int, ...], list[Slot]]:
        """By groups of this rank, what not all ranks reduce; both in the order of ``slots``."""
        found: dict[tuple[int, ...], list[Slot]] = {}
        for slot in slots:
            if len(members := self.of(slot.parameter)) < self.size:
                found.setdefault(members, []).append(slot)
        return found


def has_groups(model: nn.Module, groups: Mapping[Any, Any] | None) -> bool:
    """Whether a layer of ``model``, or ``groups``, says over which ranks it is reduced."""
    if groups is None:
        return False
    return bool(groups) or any(hasattr(module, ATTRIBUTE) for module in model.modules())


def grouping_of(
    model: nn.Module, groups: Mapping[Any, Any] | None, base: dist.ProcessGroup
) -> Grouping:
    """What layers of ``model`` say, and ``groups``, which has a group, or None, by what it is of.

    Without ``groups`` nobody has asked: a script of others may use the layers' attribute for
    what it reduces itself.

    Raises `PluginError` for what is no part of the model, a group that this rank is not in, and
    parameters that are in two groups.
    """
    grouping = Grouping(base.size())
    if groups is None:
        return grouping
    named = chain(model.named_parameters(), model.named_buffers())
    names = {id(tensor): name for name, tensor in named}
    said: list[tuple[Any, Any, str]] = [
        (module, getattr(module, ATTRIBUTE), f"{ATTRIBUTE} of {name or type(module).__name__!r}")
        for name, module in model.named_modules()
        if hasattr(module, ATTRIBUTE)
    ]
    modules = set(map(id, model.modules()))
    for key, group in groups.items():
        if isinstance(key, nn.Module) and id(key) in modules:
            said.append((key, group, f"groups[{type(key).__name__}]"))
        elif isinstance(key, torch.Tensor) and id(key) in names:
            said.append((key, group, f"groups[{names[id(key)]!r}]"))
        else:
            raise PluginError(
                f"groups has a {type(key).__name__} that is neither a parameter nor a module of "
                f"this {type(model).__name__}"
            )
    for what, group, where in said:
        ranks = _ranks(group, base, where)
        is_module = isinstance(what, nn.Module)
        for tensor in chain(what.parameters(), what.buffers()) if is_module else [what]:
            if grouping.ranks.setdefault(id(tensor), ranks) != ranks:
                raise PluginError(
                    f"{names[id(tensor)]!r} is in two groups, of ranks "
                    f"{_text(grouping.of(tensor))} and {_text(ranks)}: a parameter is reduced over "
                    "one"
                )
    return grouping


def _ranks(group: Any, base: dist.ProcessGroup, where: str) -> tuple[int, ...]:
    """The ranks of ``group`` as those of ``base``, in their order."""
    if group is None:
        return (base.rank(),)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise PluginError(f"{where} is a group that rank {base.rank()} is not in")
    if not isinstance(group, dist.ProcessGroup):
        raise PluginError(f"{where} is a {type(group).__name__}, neither a ProcessGroup nor None")
    all_ranks = dist.get_process_group_ranks(base)
    try:
        members = dist.get_process_group_ranks(group)
    except KeyError:
        raise PluginError(f"{where} is a group that was destroyed") from None
    outside = sorted(set(members) - set(all_ranks))
    if outside:
        raise PluginError(
            f"{where} has rank {', '.join(map(str, outside))}, which the model is not trained on"
        )
    return tuple(sorted(map(all_ranks.index, members)))


def refuse_reduced(ddp: DistributedDataParallel, grouping: Grouping) -> None:
    """Raises PluginError if ``ddp`` averages over all ranks what some reduce."""
    parted, ignored = grouping.parted, getattr(ddp, "parameters_to_ignore", ())
    tensors = chain(
        ddp.module.named_parameters(remove_duplicate=False),
        ddp.module.named_buffers(remove_duplicate=False),
    )
    names = [n for n, tensor in tensors if id(tensor) in parted and n not in ignored]
    if names:
        raise PluginError(
            f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''} "
            f"{'is' if len(names) == 1 else 'are'} to be reduced over some ranks only, but "
            "DistributedDataParallel has given all of them rank 0's values and would average over "
            "all: call DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, "
            "names) before DistributedDataParallel(module)"
        )


def refuse_other_groups(model: nn.Module, session: PlannedSession, grouping: Grouping) -> None:
    """Raises PluginError if ``model`` was grouped otherwise when ``session`` was begun."""
    every = tuple(range(grouping.size))
    first = {id(slot.parameter): every for slot in session.slots}
    if isinstance(session, HookedSession):
        first.update((key, part.members) for key, part in session.partitions.items())
    for name, parameter in model.named_parameters():
        before, now = first.get(id(parameter)), grouping.of(parameter)
        if before is None and not (parameter.requires_grad and id(parameter) in grouping.ids):
            continue
        if before != now:
            raise PluginError(
                f"{name!r} is to be reduced over ranks {_text(now)}, but the first wrap() of this "
                f"model said {'nothing of it' if before is None else _text(before)}: say all "
                "groups there"
            )


def partitions_of(
    slots: Sequence[Slot],
    grouping: Grouping,
    control: Group,
    wire_of: Callable[[int, int, Sequence[int]], Summing],
    *,
    are_given: bool,
) -> dict[int, Partition]:
    """The partition of each parameter that not all ranks reduce, by its id. Collective.

    Call it on all ranks, if `statements` were the same. Raises `MismatchError` on all of them
    unless every rank of a group names the same group, and begins with the same values.

    Args:
        wire_of: opens what sums over the group of this rank, from the number of a partition, the
            place of the group in it, and the members.
        are_given: the ranks of a group are given the values of its first one.
    """
    divisions = grouping.divisions(slots)
    values = [
        "" if are_given else digest_of(slot.parameter for slot in divided)
        for divided in divisions.values()
    ]
    mine = json.dumps([*zip(divisions, values, strict=True)])
    said: list[list[list[Any]]] = [*map(json.loads, control.gather_text("groups", mine))]
    for number, divided in enumerate(divisions.values()):
        name = divided[0].name
        for rank, (members, digest) in enumerate(theirs[number] for theirs in said):
            for member in members:
                others, value = said[member][number]
                if others != members:
                    raise MismatchError(
                        f"the ranks disagree: on rank {rank}, {name!r} is reduced over ranks "
                        f"{_text(members)}, on rank {member} over {_text(others)}; every rank of a "
                        "group must name the same"
                    )
                if value != digest:
                    raise MismatchError(
                        f"ranks {_text(members)} reduce {name!r} and others in its group among "
                        "themselves, but begin with different values: give all of them the same"
                    )
    partitions: dict[int, Partition] = {}
    for number, (members, divided) in enumerate(divisions.items()):
        groups = sorted({tuple(theirs[number][0]) for theirs in said})
        place = groups.index(members)
        part = Partition(members, place, len(groups), wire_of(number, place, members))
        partitions.update((id(slot.parameter), part) for slot in divided)
    return partitions


def statements(slots: Sequence[Slot], grouping: Grouping) -> list[str]:
    """Which parameters are in which group, a line for each; the same on all ranks."""
    divisions = enumerate(grouping.divisions(slots).values(), 1)
    return [f"{slot.name} is in group {n}" for n, divided in divisions for slot in divided]


def _text(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
