"""Questions of other ranks, each answered as soon as this one has come as far."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from time import monotonic
from typing import Final

from bytesched.errors import BytesschedError

from ..dependency.progress import Progress
from .rank_calls import packed_error

__all__ = ["Answering", "Reply"]


#: for what is being answered when nobody asks any more
_PATIENCE_S: Final = 5.0


@dataclass(frozen=True)
class Reply:
    """What can be answered some time."""

    #: whether it can be now; the lock of the session's progress is held
    is_ready: Callable[[], bool]
    #: the answer; raises an error of ours in its place
    make: Callable[[], bytes]
    #: the answer when the time is over
    late: Callable[[], BytesschedError]


class Answering:
    """One thread that answers, however many ranks ask; none of them waits for another.

    It starts with the first question.

    Args:
        find: what answers a question.
        answer: sends a rank its answer.
    """

    def __init__(
        self,
        progress: Progress,
        timeout_s: float,
        *,
        find: Callable[[bytes], Reply],
        answer: Callable[[int, bytes], None],
    ) -> None:
        self._progress = progress
        self._timeout_s = timeout_s
        self._find = find
        self._answer = answer
        #: None: there will be no more
        self._asked: SimpleQueue[tuple[int, bytes] | None] = SimpleQueue()
        #: with whom they are for, and until when they may be
        self._waiting: list[tuple[int, Reply, float]] = []
        self._thread: threading.Thread | None = None

    def asked(self, rank: int, question: bytes) -> None:
        """Another rank asks. A thread of the carrier, always the same one."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="bytesched-answering", daemon=True
            )
            self._thread.start()
        self._put((rank, question))

    def close(self) -> None:
        """Nothing is answered any more."""
        if self._thread is not None:
            self._put(None)
            self._thread.join(_PATIENCE_S)

    def _put(self, asked: tuple[int, bytes] | None) -> None:
        self._asked.put(asked)
        with self._progress.lock:
            self._progress.notify()

    def _run(self) -> None:
        try:
            self._answer_while_asked()
        except Exception as error:  # noqa: BLE001 - it must reach the user's thread
            self._progress.fail(error)

    def _answer_while_asked(self) -> None:
        while True:
            # Who waits for progress is woken by all of it: not where nobody asks.
            if not self._waiting or not self._asked.empty():
                asked = self._asked.get()
                if asked is None:
                    return
                self._begin(*asked)
            first_s = min((until_s for _, _, until_s in self._waiting), default=monotonic())
            self._progress.done_by(first_s, self._has_more)
            self._answer_all()

    def _begin(self, rank: int, question: bytes) -> None:
        try:
            reply = self._find(question)
        except BytesschedError as error:
            self._answer(rank, packed_error(error))
            return
        self._waiting.append((rank, reply, monotonic() + self._timeout_s))

    def _has_more(self) -> bool:
        return not self._asked.empty() or any(reply.is_ready() for _, reply, _ in self._waiting)

    def _answer_all(self) -> None:
        """Whatever can be answered."""
        waiting, self._waiting = self._waiting, []
        for rank, reply, until_s in waiting:
            with self._progress.lock:
                is_ready = reply.is_ready()
            error = self._progress.error
            if not is_ready and error is None and monotonic() < until_s:
                self._waiting.append((rank, reply, until_s))
                continue
            try:
                if is_ready:
                    self._answer(rank, reply.make())
                elif error is None:
                    raise reply.late()
                elif isinstance(error, BytesschedError):
                    raise error
                else:
                    raise BytesschedError(f"another rank has failed: {error}")
            except BytesschedError as instead:
                self._answer(rank, packed_error(instead))
