"""How the ranks of a session come together: groups are opened, statements compared."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType

import torch.distributed as dist

from bytesched.config import Config
from bytesched.observe import Observers
from bytesched.trace.timeline import observers_of

from ..routes.groups.group import Group
from ..routes.groups.opening import closed_on_error, open_group
from ..warmup.agree import agree

__all__ = ["Joining", "joining"]


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
