"""The turn of this process on a device that several jobs share.

A turn affects time, never progress: it is given back before anything is waited for, and at a limit
in any case, as a script may wait for other ranks where nobody sees it. Two jobs of several ranks
could otherwise hold what the other one waits for, each on another device.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Final

from bytesched.errors import SchedulerTimeout
from bytesched.share.tickets import Ticket, Tickets

log = logging.getLogger("bytesched")

#: A turn ends after so many times the longest of the last ones, within these bounds; at first,
#: and at most, after the second one.
_LIMIT_LENGTHS: Final = 4.0
_LIMITS_S: Final = (0.5, 10.0)
_LAST_TURNS: Final = 16
#: how often a wait checks what else may have gone wrong
_LOOKS_EVERY_S: Final = 1.0
#: how often the device is asked whether it has computed all of a turn
_QUEUED_LOOKS_EVERY_S: Final = 0.0005
#: after which it is logged, once, who is waited for
_PATIENCE_S: Final = 30.0

#: the turns that this process has; looked at without a lock wherever something waits
HELD: Final[set[Turn]] = set()
#: all that there are
_turns: Final[weakref.WeakSet[Turn]] = weakref.WeakSet()


@dataclass(slots=True)
class Totals:
    """What one `Turn` has counted."""

    turns: int = 0
    #: came to their limit
    ended: int = 0
    waited_s: float = 0.0


#: of all that there were: a job's figures never fall
_totals: Final[list[Totals]] = []


class Turn:
    """What a process has or waits for, on one device.

    Args:
        tickets: the queue of that device.
        timeout_s: longest time to wait for it.
        queued: called when the turn is given back; what it returns tells whether the device has
            computed what was queued by then. None: it has, always.
        limits_s: the least and the most time after which a turn ends by itself.
    """

    def __init__(
        self,
        tickets: Tickets,
        *,
        timeout_s: float,
        queued: Callable[[], Callable[[], bool]] | None = None,
        limits_s: tuple[float, float] = _LIMITS_S,
    ) -> None:
        self._tickets = tickets
        self._timeout_s = timeout_s
        self._queued = queued
        self._limits_s = limits_s
        self._changed = threading.Condition()
        self._ticket: Ticket | None = None
        #: a thread waits for the turn
        self._is_awaited = False
        #: it is given back as soon as this says that the device has computed what was queued
        self._is_computed: Callable[[], bool] | None = None
        self._since_s = 0.0
        #: this turn has come to its limit; those who computed go on without it
        self._is_over = False
        self._lengths_s: deque[float] = deque(maxlen=_LAST_TURNS)
        self._keeper: threading.Thread | None = None
        self._is_closed = False
        self._warned = False
        self.totals = Totals()
        _totals.append(self.totals)
        _turns.add(self)

    def take(self, look: Callable[[], None] | None = None) -> None:
        """Returns when this process has the turn. Any thread; nothing if it has it already.

        Args:
            look: called every second of a wait; what it raises ends the wait.

        Raises `SchedulerTimeout`, which names who has it.
        """
        if self in HELD:
            return
        began_s = monotonic()
        with self._changed:
            while self._is_awaited or self._is_computed is not None:
                self._check(began_s, look)
                self._changed.wait(_LOOKS_EVERY_S)
            if self in HELD or self._is_closed:
                return
            self._is_awaited = True
        has_it = False
        try:
            self._ticket = ticket = self._tickets.draw()
            while not ticket.wait(_LOOKS_EVERY_S):
                self._check(began_s, look, ticket)
            has_it = True
        finally:
            with self._changed:
                self._is_awaited = False
                self.totals.waited_s += monotonic() - began_s
                if has_it and not self._is_closed:
                    self._begin()
                else:
                    self._end()
                self._changed.notify_all()

    def give_back(self) -> None:
        """The next one has it. Any thread; nothing if this process does not have it."""
        with self._changed:
            if self in HELD:
                self._measure()
                if self._queued is None:
                    self._end()
                else:
                    HELD.discard(self)
                    self._is_computed = self._queued()
                    self._changed.notify_all()
            elif self._is_over:
                self._measure()
                self._is_over = False

    def close(self) -> None:
        """Gives it back, and takes it no more. Idempotent."""
        with self._changed:
            self._is_closed = True
            if not self._is_awaited:
                self._end()
            self._changed.notify_all()

    # -- with the lock -------------------------------------------------------------------

    def _begin(self) -> None:
        self._since_s = monotonic()
        self._is_over = False
        self.totals.turns += 1
        HELD.add(self)
        if self._keeper is None:
            self._keeper = threading.Thread(target=self._keep, name="bytesched-turn", daemon=True)
            self._keeper.start()

    def _end(self) -> None:
        HELD.discard(self)
        self._is_computed = None
        if self._ticket is not None:
            self._ticket.give_back()
            self._ticket = None

    def _measure(self) -> None:
        length_s = monotonic() - self._since_s
        if self._is_over:
            # What came after the limit: if another rank was waited for, that is over soon.
            length_s = max(0.0, length_s - self._limit_s)
        self._lengths_s.append(length_s)

    @property
    def _limit_s(self) -> float:
        least_s, most_s = self._limits_s
        if not self._lengths_s:
            return most_s
        return min(max(_LIMIT_LENGTHS * max(self._lengths_s), least_s), most_s)

    # -- waiting -------------------------------------------------------------------------

    def _check(
        self, began_s: float, look: Callable[[], None] | None, ticket: Ticket | None = None
    ) -> None:
        """Raises what ends a wait."""
        if look is not None:
            look()
        waited_s = monotonic() - began_s
        who = (ticket.front if ticket is not None else "") or "this process"
        if waited_s > self._timeout_s:
            raise SchedulerTimeout(
                f"waited {self._timeout_s:g} s for the turn on a shared device, which {who} has: "
                "it computes for so long, or was stopped. End or continue it, or start this job "
                "without share"
            )
        if waited_s > min(_PATIENCE_S, self._timeout_s / 2) and not self._warned:
            self._warned = True
            log.warning("waiting for the turn on a shared device, which %s has (said once)", who)

    def _keep(self) -> None:
        """The thread that ends turns: at their limit, and when the device has come to an end."""
        with self._changed:
            is_idle = False
            while not self._is_closed:
                if self._is_computed is not None:
                    is_over = monotonic() >= self._since_s + self._limit_s
                    if is_over or self._is_computed():
                        self._end()
                        self._changed.notify_all()
                    else:
                        self._changed.wait(_QUEUED_LOOKS_EVERY_S)
                elif self not in HELD:
                    if is_idle:
                        break
                    # Nobody wakes it for a turn that begins: it is awake before any limit is over.
                    woken = self._changed.wait(self._limits_s[0])
                    is_idle = not woken and self not in HELD and self._is_computed is None
                elif (left_s := self._since_s + self._limit_s - monotonic()) > 0:
                    self._changed.wait(left_s)
                else:
                    self._give_up()
            self._keeper = None

    def _give_up(self) -> None:
        self.totals.ended += 1
        if self.totals.ended == 1:
            log.warning(
                "this job has computed for %.3g s in one turn on a shared device, which is the "
                "limit, and lets others compute beside it: its iterations differ much, or the "
                "script waits for other ranks inside; put bytesched.urgent() around collectives "
                "of your own (said once; stats()['turns_ended'] counts)",
                self._limit_s,
            )
        self._end()
        self._is_over = True

    def forked(self) -> None:
        """In a child, which has no turn and no thread."""
        self._changed = threading.Condition()
        self._keeper = None
        self._is_closed = True
        self._is_awaited, self._is_computed = False, None
        if self._ticket is not None:
            self._ticket.forget()
            self._ticket = None

    def __repr__(self) -> str:
        state = "held" if self in HELD else "awaited" if self._is_awaited else "free"
        return f"<Turn {state}, {self.totals.turns} turns, {self.totals.ended} ended at the limit>"


def _forked() -> None:
    HELD.clear()
    _totals.clear()
    for turn in tuple(_turns):
        turn.forked()


os.register_at_fork(after_in_child=_forked)


def turn_figures() -> dict[str, int | float]:
    """Totals of this process, for ``stats()``."""
    return {
        "turns": sum(one.turns for one in _totals),
        "turn_wait_s": sum(one.waited_s for one in _totals),
        "turns_ended": sum(one.ended for one in _totals),
    }


@contextmanager
def released() -> Iterator[None]:
    """This thread waits for something: others have the turns of this process meanwhile.

    They are taken again at the end, unless it is an error.
    """
    turns = tuple(HELD)
    for turn in turns:
        turn.give_back()
    yield
    for turn in turns:
        turn.take()
