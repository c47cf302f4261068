"""Parameters that some ranks reduce among themselves: which, over which ranks, and whether the
ranks agree on it."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bytesched.config import Config
from bytesched.errors import MismatchError, PluginError

from ..layout import digest_of
from ..planned.bundles import Slot
from ..planned.wire import Partition, Summing
from ..routes.groups.group import Group
from .shell import ignored_by

__all__ = [
    "Grouping",
    "grouping_of",
    "has_groups",
    "partitions_of",
    "reduces_itself",
    "refuse_levels",
    "refuse_other_groups",
    "refuse_other_values",
    "refuse_reduced",
    "statements",
]

#: of a module: the process group over which gradients of all parameters below it are reduced, or
#: None: over no other rank
ATTRIBUTE: Final = "data_parallel_group"

_NONE: Final = object()


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

    def outside(self, members: Sequence[int]) -> Container[int]:
        """The ids of what is not reduced by ``members`` alone."""
        mine = {key for key, ranks in self.ranks.items() if ranks == tuple(members)}
        return _AllBut(mine)

    def of(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """The ranks that reduce ``tensor``."""
        return self.ranks.get(id(tensor), tuple(range(self.size)))


class _AllBut:
    """Contains everything but ``left``."""

    def __init__(self, left: Set[int]) -> None:
        self._left = left

    def __contains__(self, key: object) -> bool:
        return key not in self._left


def has_groups(model: nn.Module, groups: Mapping[Any, Any] | None) -> bool:
    """Whether a layer of ``model``, or ``groups``, says over which ranks it is reduced."""
    if groups is None:
        return False
    return bool(groups) or any(
        getattr(module, ATTRIBUTE, _NONE) is not _NONE for module in model.modules()
    )


def grouping_of(
    model: nn.Module, groups: Mapping[Any, Any] | None, base: dist.ProcessGroup
) -> Grouping:
    """What layers of ``model`` say, and ``groups``, which has a group, or None, by what it is of.

    Without ``groups`` nobody has asked: a script of others may use the layers' attribute for
    what it reduces itself.

    Raises `PluginError` for what is no part of the model, a group that this rank is not in, and
    parameters that are in two groups.
    """
    if groups is None:
        return Grouping(base.size())
    names: dict[int, str] = {}
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        names[id(tensor)] = name
    grouping = Grouping(base.size())

    def add(tensor: torch.Tensor, ranks: tuple[int, ...]) -> None:
        if grouping.ranks.setdefault(id(tensor), ranks) != ranks:
            raise PluginError(
                f"{names[id(tensor)]!r} is in two groups, of ranks {_text(grouping.of(tensor))} "
                f"and {_text(ranks)}: a parameter is reduced over one"
            )

    for where, module in model.named_modules():
        group = getattr(module, ATTRIBUTE, _NONE)
        if group is not _NONE:
            ranks = _ranks(group, base, f"{ATTRIBUTE} of {where or type(module).__name__!r}")
            for tensor in chain(module.parameters(), module.buffers()):
                add(tensor, ranks)
    modules = set(map(id, model.modules()))
    for key, group in groups.items():
        if isinstance(key, nn.Module) and id(key) in modules:
            ranks = _ranks(group, base, f"groups[{type(key).__name__}]")
            for tensor in chain(key.parameters(), key.buffers()):
                add(tensor, ranks)
        elif isinstance(key, torch.Tensor) and id(key) in names:
            add(key, _ranks(group, base, f"groups[{names[id(key)]!r}]"))
        else:
            raise PluginError(
                f"groups has a {type(key).__name__} that is neither a parameter nor a module of "
                f"this {type(model).__name__}"
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


def reduces_itself(ddp: DistributedDataParallel | None, grouping: Grouping) -> bool:
    """Whether ``ddp``, or who averages over all ranks, can do with ``grouping`` as it is."""
    left_out = () if ddp is None else ignored_by(ddp)
    return not grouping.parted and all(id(p) not in grouping.ids for p in left_out)


def refuse_levels(config: Config) -> None:
    """Raises PluginError where hosts are to sum first, which some ranks alone cannot."""
    if config.hierarchy == "on":
        raise PluginError(
            "hierarchy = 'on' is not there for a model with parameters that only some ranks "
            "reduce: leave it out"
        )


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


def refuse_other_groups(
    model: nn.Module,
    reduced: Iterable[nn.Parameter],
    partitions: Mapping[int, Partition],
    grouping: Grouping,
) -> None:
    """Raises PluginError if ``model`` was grouped otherwise when it was wrapped first.

    Args:
        reduced: by some ranks or all, from then on.
        partitions: of those that not all ranks reduce, by the id of the parameter.
    """
    every = tuple(range(grouping.size))
    first = dict.fromkeys(map(id, reduced), every)
    first.update((key, partition.members) for key, partition in partitions.items())
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
) -> dict[int, Partition]:
    """The partition of each parameter that not all ranks reduce, by its id. Collective.

    Call it on all ranks, if `statements` were the same. Raises `MismatchError` on all of them
    unless every rank of a group names the same group.

    Args:
        wire_of: opens what sums over the group of this rank, from the number of a partition, the
            place of the group in it, and the members.
    """
    divisions = _divisions(slots, grouping)
    texts = control.gather_text("groups", json.dumps(divisions))
    said: list[list[tuple[int, ...]]] = [[tuple(d) for d in json.loads(t)] for t in texts]
    by_members: dict[tuple[int, ...], Partition] = {}
    for number, mine in enumerate(divisions):
        name = next(s.name for s in slots if grouping.of(s.parameter) == mine)
        for rank in range(control.size):
            for member in said[rank][number]:
                if said[member][number] != said[rank][number]:
                    raise MismatchError(
                        f"the ranks disagree: on rank {rank}, {name!r} is reduced over ranks "
                        f"{_text(said[rank][number])}, on rank {member} over "
                        f"{_text(said[member][number])}; every rank of a group must name the same"
                    )
        groups = sorted({one[number] for one in said})
        place = groups.index(mine)
        wire = wire_of(number, place, mine)
        by_members[mine] = Partition(mine, place, len(groups), wire)
    return {
        id(slot.parameter): by_members[members]
        for slot in slots
        if (members := grouping.of(slot.parameter)) in by_members
    }


def statements(slots: Sequence[Slot], grouping: Grouping) -> list[str]:
    """Which parameters are in which group, a line for each; the same on all ranks."""
    numbers = {members: n for n, members in enumerate(_divisions(slots, grouping), 1)}
    found = ((slot.name, numbers.get(grouping.of(slot.parameter))) for slot in slots)
    return [f"{name} is in group {number}" for name, number in found if number is not None]


def _divisions(slots: Sequence[Slot], grouping: Grouping) -> list[tuple[int, ...]]:
    """The groups of this rank that do not have all ranks, each once, in the order of slots."""
    found = (grouping.of(slot.parameter) for slot in slots)
    return list(dict.fromkeys(members for members in found if len(members) < grouping.size))


def refuse_other_values(slots: Sequence[Slot], grouping: Grouping, control: Group) -> None:
    """Raises MismatchError on all ranks unless each group begins with equal values; collective."""
    divisions = _divisions(slots, grouping)
    in_group = [[s for s in slots if grouping.of(s.parameter) == mine] for mine in divisions]
    mine = [
        (members, digest_of(slot.parameter for slot in found))
        for members, found in zip(divisions, in_group, strict=True)
    ]
    said = [json.loads(text) for text in control.gather_text("values", json.dumps(mine))]
    for number, found in enumerate(in_group):
        for theirs in said:
            members, digest = theirs[number]
            if digest != said[members[0]][number][1]:
                raise MismatchError(
                    f"ranks {_text(members)} reduce {found[0].name!r} and others in its group "
                    "among themselves, but begin with different values: give all of them the same"
                )


def _text(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
