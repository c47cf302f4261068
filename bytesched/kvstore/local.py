"""A store within one process, for a worker alone or for several threads."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from bytesched.errors import (
    InvalidTransition,
    MismatchError,
    PeerLost,
    SchedulerClosed,
    SchedulerTimeout,
)
from bytesched.kvstore.protocol import Key, describe, known


@dataclass
class _Entry:
    what: str
    value: Any
    #: what the workers pushed in this step, by rank
    pushed: dict[int, Any] = field(default_factory=dict)
    #: workers that have pushed and not pulled since
    unpulled: set[int] = field(default_factory=set)


@dataclass
class _Shared:
    num_workers: int
    updater: Callable[[Key, Any, Any], None] | None
    changed: threading.Condition = field(default_factory=threading.Condition)
    entries: dict[Key, _Entry] = field(default_factory=dict)
    #: per collective call: what each worker called, and its value
    meetings: dict[int, dict[int, tuple[str, Any]]] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)


class LocalKVStore:
    """A store within this process: one worker, or several threads (`group`).

    Args:
        updater: ``updater(key, total, value)`` changes ``value``, in place, by the sum of a
            step; without one, the sum replaces the value.
        timeout_s: how long to wait for other workers.
    """

    def __init__(
        self,
        *,
        updater: Callable[[Key, Any, Any], None] | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self._shared = _Shared(1, updater)
        self._rank = 0
        self._timeout_s = timeout_s
        self._meetings = 0
        self._closed = False

    @classmethod
    def group(
        cls,
        num_workers: int,
        *,
        updater: Callable[[Key, Any, Any], None] | None = None,
        timeout_s: float = 60.0,
    ) -> list[LocalKVStore]:
        """One store in the views of ``num_workers`` workers, one thread for each."""
        shared = _Shared(num_workers, updater)
        views = []
        for rank in range(num_workers):
            view = cls(timeout_s=timeout_s)
            view._shared, view._rank = shared, rank
            views.append(view)
        return views

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""
        return self._rank

    @property
    def num_workers(self) -> int:
        """How many workers push to this store."""
        return self._shared.num_workers

    @property
    def is_stateful(self) -> bool:
        """True if values depend on more than the last step: keys must stay what they are."""
        return self._shared.updater is not None

    def init(self, key: Key, value: Any) -> None:
        """Makes ``key``, with the value of worker 0."""
        with self._shared.changed:
            if key in self._shared.entries:
                raise InvalidTransition(f"key {key!r} has been initialised already")
        first = self._meet(f"init {key!r} as {describe(value)}", copy.deepcopy(value))
        with self._shared.changed:
            self._shared.entries.setdefault(key, _Entry(describe(first), first))

    def delete(self, key: Key) -> None:
        """Forgets ``key``; every worker calls it."""
        self._meet(f"delete {key!r}")
        with self._shared.changed:
            self._shared.entries.pop(key, None)

    def push(self, key: Key, value: Any, priority: int = 0) -> None:
        """Adds ``value`` to this step of ``key``."""
        shared = self._shared
        with shared.changed:
            entry = self._entry(key, value, "push")
            if self._rank in entry.unpulled:
                raise InvalidTransition(
                    f"worker {self._rank} pushed key {key!r} twice in one step: pull it first"
                )
            entry.pushed[self._rank] = copy.deepcopy(value)
            entry.unpulled.add(self._rank)
            if len(entry.pushed) == shared.num_workers:
                self._complete(key, entry)
                shared.changed.notify_all()

    def pull(self, key: Key, out: Any, priority: int = 0) -> None:
        """Fills ``out`` with the value of ``key``."""
        with self._shared.changed:
            entry = self._entry(key, out, "pull")
            self._wait(lambda: self._rank not in entry.pushed, f"the pushes of key {key!r}")
            out[...] = entry.value
            entry.unpulled.discard(self._rank)

    def pushpull(self, key: Key, value: Any, out: Any = None, priority: int = 0) -> None:
        """Push, then pull into ``out``, or into ``value`` if that is None."""
        self.push(key, value, priority)
        self.pull(key, value if out is None else out, priority)

    def barrier(self) -> None:
        """Returns when every worker has called it."""
        self._meet("barrier")

    def close(self) -> None:
        """Leaves the store; workers that wait for this one raise PeerLost."""
        with self._shared.changed:
            self._closed = True
            self._shared.gone.add(self._rank)
            self._shared.changed.notify_all()

    def _complete(self, key: Key, entry: _Entry) -> None:
        total: Any = None
        for _, value in sorted(entry.pushed.items()):
            if total is None:
                total = value
            else:
                total += value
        entry.pushed.clear()
        if self._shared.updater is None:
            entry.value = total
        else:
            self._shared.updater(key, total, entry.value)

    def _entry(self, key: Key, value: Any, what: str) -> _Entry:
        if self._closed:
            raise SchedulerClosed(f"{what} of key {key!r} on a closed store")
        return known(self._shared.entries, key, what, value)

    def _meet(self, what: str, value: Any = None) -> Any:
        """Returns the value of worker 0 when all workers have come here, to do the same."""
        shared = self._shared
        with shared.changed:
            if self._closed:
                raise SchedulerClosed(f"{what} on a closed store")
            meeting = shared.meetings.setdefault(self._meetings, {})
            self._meetings += 1
            meeting[self._rank] = (what, value)
            shared.changed.notify_all()
            self._wait(lambda: len(meeting) == shared.num_workers, f"all workers at: {what}")
        for rank, (other, _) in sorted(meeting.items()):
            if other != meeting[0][0]:
                raise MismatchError(
                    f"worker 0 called {meeting[0][0]}, and worker {rank} called {other}"
                )
        return meeting[0][1]

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        """With the lock held."""
        deadline = monotonic() + self._timeout_s
        while not done():
            left_s = deadline - monotonic()
            if self._shared.gone:
                gone = ", ".join(map(str, sorted(self._shared.gone)))
                raise PeerLost(f"worker {gone} left; this one waited for {what}", rank=self._rank)
            if left_s <= 0 or not self._shared.changed.wait(left_s):
                raise SchedulerTimeout(f"waited {self._timeout_s:g} s for {what}", rank=self._rank)

    def __repr__(self) -> str:
        return f"<LocalKVStore worker {self._rank} of {self.num_workers}>"
