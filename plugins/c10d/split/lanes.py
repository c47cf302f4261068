"""What one rank sends to another in turns, where that one may be some turns behind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from bytesched.plugins.c10d.split.outbox import Outbox
from bytesched.task import CommTask

__all__ = ["Lanes"]


class Lanes:
    """An outbox for each turn of which anything is under way: no turn waits for a later one.

    A message that the other rank does not expect yet stays under way until it does. It may need
    something of an earlier turn to come as far.

    Args:
        before: what goes before all turns.
        make: makes an outbox that waits while the given function, called under the lock, says so.
    """

    def __init__(self, before: Outbox, make: Callable[[Callable[[], bool]], Outbox]) -> None:
        self._before = before
        self._make = make
        self._outboxes: list[Outbox] = []
        #: of each of these, the last one
        self._turns: list[int] = []

    def put(self, turn: int, place: int, chunk: CommTask) -> None:
        """Enqueues ``chunk``; lower turns go first, and in a turn lower places. Under the lock."""
        if turn not in self._turns:
            self._turns[self._idle()] = turn
        self._outboxes[self._turns.index(turn)].put(turn, place, chunk)

    def let_go(self) -> None:
        """Nothing waits any more in an outbox that goes before others. Under the lock."""
        for outbox in self._outboxes:
            if outbox.is_waiting:
                outbox.wake()

    def wake(self) -> None:
        """It may be over. Under the lock."""
        for outbox in self._outboxes:
            outbox.wake()

    def _idle(self) -> int:
        for number, outbox in enumerate(self._outboxes):
            if outbox.is_idle:
                return number
        number = len(self._outboxes)
        self._outboxes.append(self._make(partial(self._is_held, number)))
        self._turns.append(0)
        return number

    def _is_held(self, number: int) -> bool:
        own = self._turns[number]
        return self._before.is_waiting or any(
            turn < own and outbox.is_waiting
            for turn, outbox in zip(self._turns, self._outboxes, strict=True)
        )

    def __repr__(self) -> str:
        return f"<Lanes of turns {self._turns}>"
