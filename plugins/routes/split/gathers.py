"""What comes from other owners in phase two, awaited from both ends."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeAlias

from ..groups.group import PATIENCE_S

__all__ = ["Gather", "Gathers"]

#: waits for the end of a receive, and does what follows
Gather: TypeAlias = Callable[[], None]


class Gathers:
    """What this rank receives from owners of chunks.

    Chunks of the back layers come while backward computes the front ones, which everything else
    then waits for: so one thread waits for the front ones first, and one for the back ones.

    Args:
        failed: called with what a gather raises; its thread ends.
    """

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        #: each begins the receives of a round, and returns what is to follow, front first
        self._to_begin: deque[Callable[[], Iterable[Gather]]] = deque()
        #: nobody waits for them yet
        self._waiting: deque[Gather] = deque()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._guarded, args=(run,), name=name, daemon=True)
            for name, run in (
                ("bytesched-gathers-front", self._run_front),
                ("bytesched-gathers-back", self._run_back),
            )
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, receive: Callable[[], Iterable[Gather]]) -> None:
        """A round begins: a thread calls ``receive``, and waits for what it returns first."""
        with self._lock:
            self._to_begin.append(receive)
            self._changed.notify_all()

    def add(self, gathers: Iterable[Gather]) -> None:
        """These are being received, front first; they are waited for after earlier ones."""
        with self._lock:
            self._waiting.extend(gathers)
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the threads, whose waits have been broken if there are any. Idempotent."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(PATIENCE_S)

    def _guarded(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:  # noqa: BLE001 - it must reach the user's thread
            if not self._closed:
                self._failed(error)

    def _run_front(self) -> None:
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._closed or self._to_begin or self._waiting)
                if self._closed:
                    return
                receive = self._to_begin.popleft() if self._to_begin else None
                gather = self._waiting.popleft() if receive is None else None
            if gather is not None:
                gather()
            elif receive is not None:
                self._add_first(list(receive()))

    def _add_first(self, gathers: list[Gather]) -> None:
        # Others may have been added by now that depend on them: a rank that waits for a norm of
        # such a sum sends no parameters.
        with self._lock:
            self._waiting.extendleft(reversed(gathers))
            self._changed.notify_all()

    def _run_back(self) -> None:
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._closed or self._waiting)
                if self._closed:
                    return
                gather = self._waiting.pop()
            gather()

    def __repr__(self) -> str:
        return f"<Gathers {len(self._waiting)} not waited for>"
