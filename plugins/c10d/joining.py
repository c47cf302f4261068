"""How the ranks of a session come together: groups, statements, first values."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from bytesched.config import Config
from bytesched.grid import why_not
from bytesched.observe import Observers
from bytesched.trace.timeline import observers_of

from ..agree import agree
from ..planned.bundles import Slot
from ..planned.terms import Terms, setting_of
from ..planned.wire import GroupWire
from ..routes.groups.group import Group
from ..routes.groups.opening import closed_on_error, kind_of, open_group
from ..routes.levels import TwoLevelSums, open_levels
from .entry import Entry

__all__ = ["BUCKET_BYTES", "Carriers", "Joining", "broadcast", "carriers", "joining"]

log = logging.getLogger("bytesched")


class Joining:
    """Opens the groups of one session over the same ranks.

    A context: an error in it is left as a note for the other ranks, and closes all groups. All
    calls are collective.

    Args:
        opened: the group of a kind, "gloo" or "nccl", for a purpose.
        config: with the timeline, which is observed from where the ranks have joined.
    """

    def __init__(self, opened: Callable[[str, str], Group], config: Config) -> None:
        self._opened = opened
        self._config = config
        self._closing = ExitStack()
        #: only connections of Gloo show that a rank is lost
        self._gloo: Group
        self._hosts: list[str] = []
        self._groups: list[Group] = []

    def open(self, purpose: str, kind: str = "gloo") -> Group:
        """A group of all ranks."""
        group = self.adopt(self._opened(kind, purpose))
        if kind == "gloo":
            self._gloo = group
            self._hosts = self._hosts or group.gather_text("host", socket.gethostname())
        for opened in self._groups:
            opened.hosts = self._hosts
        return group

    def adopt(self, group: Group) -> Group:
        """``group``, of some ranks, is closed by an error as well; returns it."""
        self._closing.enter_context(closed_on_error(group))
        self._groups.append(group)
        group.hosts = self._hosts
        return group

    def agree(self, statements: list[str]) -> None:
        """Raises `MismatchError` on every rank if ``statements`` differ; after a group of Gloo."""
        agree(
            statements,
            self._gloo.rank,
            is_same=self._gloo.is_same,
            gather=self._gloo.gather_text,
        )

    def observers(self) -> Observers:
        """What the settings ask for; after a group of Gloo."""
        return observers_of(self._gloo, self._config)

    def __enter__(self) -> Joining:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closing.__exit__(kind, error, trace)


def joining(base: dist.ProcessGroup, name: str, config: Config) -> Joining:
    """Joins the ranks of ``base``, the user's group, in a session ``name`` of this job."""

    def opened(kind: str, purpose: str) -> Group:
        return open_group(base, kind, name=f"{name}/{purpose}", timeout_s=config.timeout_s)

    return Joining(opened, config)


#: of buckets and of chunks, by the kind of the carrier, where script and settings say nothing
BUCKET_BYTES: Final = {"gloo": 1 << 20, "nccl": 16 << 20}


@dataclass(frozen=True, eq=False)
class Carriers:
    """The groups of one session. All calls are collective."""

    base: dist.ProcessGroup
    name: str
    device: torch.device
    config: Config
    #: where others are opened
    ranks: Joining
    #: what sums travel on, and what it is: "gloo" or "nccl"
    data: Group
    kind: str
    #: of Gloo, what numbers of the host travel on; the same, if that is of Gloo
    control: Group
    #: of what fails once the ranks have joined, there is a trace
    observers: Observers

    def open_part(self, members: Sequence[int], purpose: str, kind: str = "gloo") -> Group:
        """A group of some ranks."""
        name = f"{self.name}/{purpose}"
        timeout_s = self.config.timeout_s
        part = open_group(self.base, kind, name=name, timeout_s=timeout_s, members=members)
        return self.ranks.adopt(part)

    def wire(self, *others: Group | None, has_parts: bool = False) -> GroupWire:
        """Sums over all ranks, in two levels where that can be, and is faster or asked for.

        Args:
            others: what is closed with it.
            has_parts: some gradients are summed over some ranks: then it is one level.
        """
        levels = None if has_parts else self._levels()
        opened = [group for group in others if group is not None]
        return GroupWire(self.data, self.control, opened, self.device, levels)

    def _levels(self) -> TwoLevelSums | None:
        if self.device.type != "cpu" or self.data.backend.name() != "gloo":
            return None
        if why_not(self.config.cell._replace(levels="two levels")):
            return None
        return open_levels(
            self.config.hierarchy,
            self.data,
            lambda purpose, members: self.open_part(members, purpose),
        )

    def terms(
        self, slots: Sequence[Slot], wire: GroupWire, *, partition_bytes: int = 0, **more: Any
    ) -> Terms:
        """What a session over ``wire`` begins with.

        Args:
            partition_bytes: where settings say nothing; 0: as usual on this carrier.
        """
        setting = setting_of(self.config, partition_bytes or BUCKET_BYTES[self.kind])
        return Terms(slots, self.config, wire, self.observers, setting, carrier=self.kind, **more)


@contextmanager
def carriers(entry: Entry, device: torch.device, config: Config) -> Iterator[Carriers]:
    """Opens those of a session; an error inside closes them, with a note for the other ranks.

    Collective.

    Args:
        device: where gradients are.
    """
    base, name = entry.base, f"session{entry.number}"
    kind = kind_of(base, device)
    with joining(base, name, config) as ranks:
        data = ranks.open("data", kind)
        control = data if kind == "gloo" else ranks.open("control")
        yield Carriers(base, name, device, config, ranks, data, kind, control, ranks.observers())


def broadcast(group: Group, module: nn.Module, *, left_out: Container[int] = ()) -> None:
    """Gives every rank the parameters and buffers of rank 0, as DDP's constructor does.

    Args:
        left_out: the ids of those that are not given.
    """
    tensors = [*module.parameters(), *module.buffers()]
    tensors = [tensor for tensor in tensors if id(tensor) not in left_out]
    group.broadcast(tensors, task="the initial broadcast")
    if group.members[group.rank] == 0:
        log.info("broadcast %d parameters and buffers of a plain module", len(tensors))
