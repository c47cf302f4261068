"""Messages between two ranks that threads wait for, and whether they can still come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bytesched.errors import TransportError

from .group import Group

__all__ = ["Messages"]


@dataclass(eq=False)
class _Awaited:
    """A message that a thread waits for."""

    peer: int
    task: str
    #: its connection was found broken
    suspected: bool = False


class Messages:
    """The sends and receives of a group.

    When a connection breaks, Gloo fails the wait for a message, but not for one that is half
    written or half read, which goes on until it times out. A shorter wait would break all
    connections at its end. So it is spare threads that wait, while another one calls `lost`.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._awaited: set[_Awaited] = set()

    def wait(self, work: Any, peer: int, *, task: str) -> None:
        """Waits for the end of ``work``, a send to ``peer`` or a receive from it.

        On a daemon thread. Raises an error of ours.
        """
        awaited = _Awaited(peer, task)
        self._awaited.add(awaited)
        try:
            self._group.wait_message(work, task=task)
        finally:
            self._awaited.discard(awaited)

    def lost(self) -> TransportError | None:
        """The error of a message that will not come, once two looks at it have found that."""
        for awaited in tuple(self._awaited):
            broken = self._group.broken([awaited.peer])
            if broken is None:
                continue
            if awaited.suspected:
                return self._group.error(broken, task=awaited.task)
            # It has time to end with what had arrived before.
            awaited.suspected = True
        return None
