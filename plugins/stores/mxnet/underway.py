"""What is under way in an MXNet store: calls until they end, chunks, and the first error."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, TypeVar

from bytesched.errors import SchedulerClosed, SchedulerTimeout
from bytesched.kvstore.protocol import Ended, Key

from ..limited import limited
from .engine import Held, post
from .keys import KeySlot

log = logging.getLogger("bytesched")

T = TypeVar("T")

#: checks per timeout for something that is late
_LOOKS = 4
#: without any answer for so long, more than the credit may go
_STUCK_S = 1.0
#: Above everything that computes: what is begun has been scheduled already, and leaves at once.
_NOW = 1_000_000


class Underway:
    """What is taken in the engine is given back here: when it has ended, or nothing can end.

    Args:
        timeout_s: how long a call may take.
        story: the last events of the schedulers, for an error's message.
    """

    def __init__(self, rank: int, timeout_s: float, story: Callable[[], list[str]]) -> None:
        #: the first error, which is final
        self.error: BaseException | None = None
        self._rank = rank
        self._timeout_s = timeout_s
        self._story = story
        self._changed = threading.Condition()
        self._closed = threading.Event()
        #: calls that were made and have not ended
        self._open = 0
        #: what is taken in the engine, and since when
        self._held: dict[KeySlot, float] = {}
        self._watchman: threading.Thread

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    def check(self, what: str) -> None:
        """Raises the first error, and SchedulerClosed after `close`; ``what`` is refused then."""
        if self.error is not None:
            raise self.error.with_traceback(None)
        if self.is_closed:
            raise SchedulerClosed(f"{what} on a closed store")

    def add(self) -> None:
        """One more call was made."""
        with self._changed:
            self._open += 1

    def begin(self, slot: KeySlot, call: str, held: Held) -> bool:
        """The engine has taken the buffers of ``slot``; false if nothing is sent any more."""
        with self._changed:
            slot.held = held
            is_lost = self.error is not None or self.is_closed
            if not is_lost:
                slot.call = call
                # a push ends twice: its task, and with the answer
                slot.missing = len(slot.chunks) * (1 if call == "pull" else 2)
                self._held[slot] = monotonic()
                self._changed.notify_all()
        if is_lost:
            self._release(slot)
        return not is_lost

    def ended(self, slot: KeySlot) -> None:
        """One task less to wait for."""
        with self._changed:
            slot.missing -= 1
            if slot.missing:
                return
            self._held.pop(slot, None)
        self._release(slot)

    def _release(self, slot: KeySlot) -> None:
        with self._changed:
            held, slot.held, slot.call = slot.held, None, ""
        if held is None:
            return
        held.release()
        with self._changed:
            self._open -= 1
            self._changed.notify_all()

    def flush(self) -> None:
        """Returns when every call made so far has ended."""
        deadline = monotonic() + self._timeout_s
        with self._changed:
            while self._open:
                self.check("flush")
                left_s = deadline - monotonic()
                if left_s <= 0 or not self._changed.wait(left_s):
                    raise SchedulerTimeout(
                        f"waited {self._timeout_s:g} s for {self._open} calls of the store",
                        rank=self._rank,
                        story=self._story(),
                    )
        self.check("flush")

    def limited(self, call: Callable[[], T], doing: str) -> T:
        """What ``call`` returns, which waits in MXNet, for servers and workers, without a limit.

        Raises SchedulerTimeout, which is final, if that takes longer than ``timeout_s``.
        """

        def late() -> SchedulerTimeout:
            error = SchedulerTimeout(
                f"waited {self._timeout_s:g} s in {doing}: a server or another worker is gone, or "
                "has not come as far",
                rank=self._rank,
                story=self._story(),
            )
            self.fail(error)
            return error

        return limited(call, self._timeout_s, late)

    # -- the end -----------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Keeps the first error, and lets everything go that waits in the engine. Any thread."""
        with self._changed:
            if self.error is not None or self.is_closed:
                return
            self.error = error
            self._changed.notify_all()
        log.error("%s; the next call of the store raises this", error)
        self._let_go()

    def begin_close(self) -> bool:
        """Nothing is sent from now on; false if that was so before."""
        with self._changed:
            is_first = not self.is_closed
            self._closed.set()
        return is_first

    def close(self) -> None:
        """Lets everything go, and ends the watch; what sends has been stopped."""
        self._let_go()
        self._watchman.join(5.0)

    def _let_go(self) -> None:
        with self._changed:
            slots = list(self._held)
            self._held.clear()
        for slot in slots:
            self._release(slot)

    def watch(self, look: Callable[[], None]) -> None:
        """From now on, calls that are late are an error; ``look`` is called every second or so."""
        self._watchman = threading.Thread(
            target=self._watch, args=(look,), name="bytesched-deadline", daemon=True
        )
        self._watchman.start()

    def _watch(self, look: Callable[[], None]) -> None:
        timeout_s = self._timeout_s
        while not self._closed.wait(min(timeout_s / _LOOKS, _STUCK_S)):
            look()
            with self._changed:
                late = [s for s, since in self._held.items() if monotonic() - since > timeout_s]
            if late:
                names = ", ".join(repr(slot.key) for slot in late[:5])
                self.fail(
                    SchedulerTimeout(
                        f"the servers have not answered for {timeout_s:g} s on key {names}: a "
                        "server or another worker is gone, or does not push it",
                        rank=self._rank,
                        story=self._story(),
                    )
                )
                return


class Moves:
    """MXNet's store as one whose pushes and pulls of chunks are begun, and report their ends.

    A push ends when the server has answered: every worker has pushed. The answer to a chunk that is
    pushed and pulled brings its value, for a pull that is asked for later would stand behind all
    that is being pushed.

    Args:
        answered: called, on any thread, with the slot of each chunk after the answer to its push.
    """

    def __init__(self, store: Any, answered: Callable[[KeySlot], None]) -> None:
        self.rank: int = store.rank
        self._store = store
        self._answered = answered
        #: whose each chunk is, by its key
        self._slots: dict[Key, KeySlot] = {}
        #: of pushes under way
        self._ends: dict[Key, Ended] = {}
        self._answers = 0
        self._answers_before = 0

    def add(self, number: Key, slot: KeySlot) -> None:
        self._slots[number] = slot

    def start_push(
        self, number: Key, buffers: Sequence[Any], ended: Ended, priority: int = 0
    ) -> None:
        slot = self._slots[number]
        self._ends[number] = ended
        if slot.call == "pushpull":
            self._store.pushpull(number, buffers, out=buffers, priority=_NOW)
        else:
            self._store.push(number, buffers, priority=_NOW)

        def answered() -> None:
            self._answers += 1
            self._end(number)
            self._answered(slot)

        _when_free(buffers, answered)

    def start_pull(
        self, number: Key, buffers: Sequence[Any], ended: Ended, priority: int = 0
    ) -> None:
        self._store.pull(number, out=buffers, priority=_NOW)
        _when_free(buffers, lambda: ended(None))

    def go_on(self) -> None:
        """Ends all pushes, if nothing was answered since the last call; their answers may come.

        Workers may push in different orders, and wait in between. Then the window can be full of
        chunks that another worker only pushes after one that is still to be sent from here.
        """
        if self._answers == self._answers_before:
            for number in list(self._ends):
                self._end(number)
        self._answers_before = self._answers

    def _end(self, number: Key) -> None:
        if (ended := self._ends.pop(number, None)) is not None:
            ended(None)


def _when_free(arrays: Sequence[Any], call: Callable[[], None]) -> None:
    """Calls when the engine has done everything to ``arrays`` that it was given so far."""

    def began(held: Held) -> None:
        held.release()
        call()

    post(began, writes=arrays)
