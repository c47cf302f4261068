"""How the ranks of a session come together: groups, statements, first values."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

from bytesched.config import Config
from bytesched.grid import why_not
from bytesched.observe import Observers
from bytesched.trace.timeline import observers_of

from ..agree import agree
from ..planned.bundles import Slot
from ..planned.terms import Terms, setting_of
from ..planned.wire import GroupWire
from ..routes.group import Group
from ..routes.levels import open_levels
from ..routes.opening import closed_on_error, kind_of, open_group
from .entry import Entry

__all__ = ["BUCKET_BYTES", "Carriers", "Joining", "broadcast", "carriers", "joining"]

log = logging.getLogger("bytesched")


class Joining(ExitStack):
    """Opens the groups of one session; the first one is of Gloo, and of all its ranks.

    A context: an error in it is left as a note for the other ranks, and closes all groups. All
    calls are collective.

    Args:
        opened: the group of a kind, "gloo" or "nccl", for a purpose, of some ranks or all.
        config: with the timeline, which is observed from where the ranks have joined.
    """

    def __init__(
        self, opened: Callable[[str, str, Sequence[int] | None], Group], config: Config
    ) -> None:
        super().__init__()
        self._opened = opened
        self._config = config
        #: the first one: only connections of Gloo show that a rank is lost
        self._first: Group
        self._hosts: list[str] = []

    def open(self, purpose: str, kind: str = "gloo", members: Sequence[int] | None = None) -> Group:
        """A group of all ranks, or of ``members``."""
        group = self._opened(kind, purpose, members)
        self.enter_context(closed_on_error(group))
        if not self._hosts:
            self._first, self._hosts = group, group.gather_text("host", socket.gethostname())
        group.hosts = self._hosts
        return group

    def agree(self, statements: list[str]) -> None:
        """Raises `MismatchError` on every rank if ``statements`` differ."""
        agree(statements, self._first.rank, self._first.gather_text)

    def observers(self) -> Observers:
        """What the settings ask for."""
        return observers_of(self._first, self._config)


def joining(base: dist.ProcessGroup, name: str, config: Config) -> Joining:
    """Joins the ranks of ``base``, the user's group, in a session ``name`` of this job."""

    def opened(kind: str, purpose: str, members: Sequence[int] | None) -> Group:
        of, timeout_s = f"{name}/{purpose}", config.timeout_s
        return open_group(base, kind, name=of, timeout_s=timeout_s, members=members)

    return Joining(opened, config)


#: of buckets and of chunks, by the kind of the carrier, where script and settings say nothing
BUCKET_BYTES: Final = {"gloo": 1 << 20, "nccl": 16 << 20}


@dataclass(frozen=True, eq=False)
class Carriers:
    """The groups of one session."""

    #: where others are opened
    ranks: Joining
    config: Config
    #: where gradients are
    device: torch.device
    #: of Gloo, what numbers of the host travel on
    control: Group
    #: what sums travel on, which may be the same, and what it is: "gloo" or "nccl"
    data: Group
    kind: str
    #: of what fails once the ranks have joined, there is a trace
    observers: Observers

    def wire(self, *others: Group | None, has_parts: bool = False) -> GroupWire:
        """Sums over all ranks, in two levels where that can be, and is faster or asked for.

        Collective.

        Args:
            others: what is closed with it.
            has_parts: some gradients are summed over some ranks: then it is one level.
        """
        levels = None
        is_one = has_parts or self.device.type != "cpu" or self.kind != "gloo"
        if not is_one and not why_not(self.config.cell._replace(levels="two levels")):
            levels = open_levels(
                self.config.hierarchy,
                self.data,
                lambda purpose, members: self.ranks.open(purpose, "gloo", members),
            )
        opened = [group for group in others if group is not None]
        return GroupWire(self.data, self.control, opened, self.device, levels)

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
    kind = kind_of(entry.base, device)
    with joining(entry.base, f"session{entry.number}", config) as ranks:
        control = ranks.open("data" if kind == "gloo" else "control")
        data = control if kind == "gloo" else ranks.open("data", kind)
        yield Carriers(ranks, config, device, control, data, kind, ranks.observers())


def broadcast(group: Group, tensors: Iterable[torch.Tensor]) -> None:
    """Gives every rank the tensors of rank 0, as DDP's constructor does with those of a model."""
    tensors = list(tensors)
    group.broadcast(tensors, task="the initial broadcast")
    if group.members[group.rank] == 0:
        log.info("broadcast %d parameters and buffers of a plain module", len(tensors))
