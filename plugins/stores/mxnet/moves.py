"""What moves the chunks of an MXNet store, and reports their ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bytesched.kvstore.protocol import Ended, Key

from .engine import Held, post
from .keys import KeySlot

__all__ = ["Moves"]

#: Above everything that computes: what is begun has been scheduled already, and leaves at once.
_NOW = 1_000_000


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
        """A chunk of ``slot`` has this key."""
        self._slots[number] = slot

    def start_push(
        self, number: Key, buffers: Sequence[Any], ended: Ended, priority: int = 0
    ) -> None:
        """See `AsyncKVStore`."""
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
        """See `AsyncKVStore`."""
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
