"""Messages between two ranks: threads that wait for them, and whether they can still come."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeAlias

from bytesched.errors import TransportError

from .group import Group


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
            work.wait()
        except RuntimeError as error:
            raise self._group.error(error, task=task) from error
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


_Begun: TypeAlias = tuple[str, Sequence[tuple[Any, int]], Callable[[], None]]


class Waiter:
    """Waits for what was begun, and reports the end of each task.

    Args:
        name: of the thread.
        fail: called there with an error, unless the thread is to end.
    """

    def __init__(
        self, messages: Messages, name: str, fail: Callable[[BaseException], None]
    ) -> None:
        self._messages = messages
        self._fail = fail
        #: of each task its name, its sends and receives with their peers, and what reports its end
        self._begun: SimpleQueue[_Begun | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._under_way = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether it waits for a message."""
        return bool(self._under_way)

    def put(self, name: str, works: Sequence[tuple[Any, int]], done: Callable[[], None]) -> None:
        """Calls ``done`` when ``works`` of a task have come, after those of earlier tasks."""
        with self._lock:
            self._under_way += 1
        self._begun.put((name, works, done))

    def stop(self) -> None:
        """Ends the thread when nothing is under way; what fails from now on was closed."""
        self._closed = True
        self._begun.put(None)

    def join(self) -> None:
        """Returns when the thread has ended, or after a few seconds."""
        self._thread.join(5.0)

    def _run(self) -> None:
        while (begun := self._begun.get()) is not None:
            try:
                self._wait(*begun)
            except BaseException as error:  # noqa: BLE001 - others wait for what does not come
                if not self._closed:
                    self._fail(error)
            # Its memory is not to wait for the next task.
            begun = None

    def _wait(self, name: str, works: Sequence[tuple[Any, int]], done: Callable[[], None]) -> None:
        try:
            for work, peer in works:
                self._messages.wait(work, peer, task=name)
        finally:
            with self._lock:
                self._under_way -= 1
        done()
