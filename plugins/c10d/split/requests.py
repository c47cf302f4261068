"""What one rank asks another for at any time, and a thread of the other one answers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from time import monotonic
from typing import Any, Final

import torch

from bytesched.errors import BytesschedError, TransportError
from bytesched.plugins.c10d.group import PATIENCE_S, Group
from bytesched.plugins.c10d.messages import Messages

__all__ = ["Requests"]

#: tags: the size of what follows, and that itself
_SIZE, _REQUEST, _ANSWER_SIZE, _ANSWER = range(4)

#: A request comes whenever the other rank's script asks; the asking one waits with a deadline.
_NO_LIMIT: Final = timedelta(days=365)

_LOOKS_EVERY_S: Final = 0.5


class Requests:
    """Questions and answers of any bytes, between every two ranks.

    Each rank says when it will ask no more, after how many rounds; a rank may go when all others
    have said so.

    Args:
        group: only these use it.
        answer: finds what rank asks for; on a thread of its own for each rank.
        ended: called when a rank has ended, after that many rounds.
        failed: called with the first error.
    """

    def __init__(
        self,
        group: Group,
        *,
        answer: Callable[[bytes], bytes],
        ended: Callable[[int, int], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._group = group
        self._messages = Messages(group)
        self._answer = answer
        self._ended = ended
        self._failed = failed
        self._closed = False
        #: with what they send
        self._farewells: list[Any] = []
        #: each guards the questions to one rank
        self._asking = {rank: threading.Lock() for rank in range(group.size) if rank != group.rank}
        self._threads = {
            peer: threading.Thread(
                target=self._serve, args=(peer,), name=f"bytesched-serve-{peer}", daemon=True
            )
            for peer in self._asking
        }
        for thread in self._threads.values():
            thread.start()

    def ask(self, peer: int, question: bytes, *, task: str) -> bytes:
        """The answer of ``peer``. On a daemon thread. Raises an error of ours."""
        with self._asking[peer]:
            try:
                self._send(peer, question, _SIZE, _REQUEST, task)
                (size,) = self._receive(peer, torch.empty(1, dtype=torch.int64), _ANSWER_SIZE, task)
                body = torch.empty(int(size), dtype=torch.uint8)
                return self._receive(peer, body, _ANSWER, task).numpy().tobytes()
            except RuntimeError as error:
                if isinstance(error, BytesschedError):
                    raise
                raise self._group.error(error, task=task) from error

    def end(self, rounds: int) -> None:
        """This rank asks no more, and reduces no more than so many rounds."""
        farewell = torch.tensor([-1 - rounds], dtype=torch.int64)
        for peer in self._asking:
            # A rank that is gone needs none.
            with contextlib.suppress(RuntimeError):
                self._farewells.append(self._begin_send(peer, farewell, _SIZE))

    def wait_ended(self, limit_s: float) -> list[int]:
        """Waits until all others have ended or are gone; returns those that have not in time."""
        deadline_s = monotonic() + limit_s
        while any(thread.is_alive() for thread in self._threads.values()):
            for thread in self._threads.values():
                thread.join(max(0.0, min(_LOOKS_EVERY_S, deadline_s - monotonic())))
            if monotonic() > deadline_s or self.lost() is not None:
                break
        return [peer for peer, thread in self._threads.items() if thread.is_alive()]

    def lost(self) -> TransportError | None:
        """The error of a message that is waited for and cannot come, if there is one."""
        return self._messages.lost()

    def close(self) -> None:
        """Ends the threads, by breaking connections if one still serves. Idempotent.

        The others have heard by then that this rank has ended.
        """
        self._closed = True
        self._group.wait_left([work for work, _ in self._farewells])
        if any(thread.is_alive() for thread in self._threads.values()):
            self._group.abort()
        for thread in self._threads.values():
            thread.join(PATIENCE_S)
        # What is under way holds the group.
        self._farewells.clear()

    # -- one thread for each other rank ------------------------------------------------

    def _serve(self, peer: int) -> None:
        try:
            while True:
                size = torch.empty(1, dtype=torch.int64)
                self._receive(peer, size, _SIZE, "a request", limit=_NO_LIMIT)
                if size[0] < 0:
                    self._ended(peer, -1 - int(size[0]))
                    return
                question = torch.empty(int(size[0]), dtype=torch.uint8)
                self._receive(peer, question, _REQUEST, "a request")
                answer = self._answer(question.numpy().tobytes())
                self._send(peer, answer, _ANSWER_SIZE, _ANSWER, "an answer")
        except Exception as error:  # noqa: BLE001 - it must reach the user's thread
            if not self._closed:
                known = isinstance(error, BytesschedError) or not isinstance(error, RuntimeError)
                self._failed(error if known else self._group.error(error))

    def _begin_send(self, peer: int, message: torch.Tensor, tag: int) -> Any:
        return self._group.backend.send([message], peer, tag), message

    def _send(self, peer: int, body: bytes, size_tag: int, tag: int, task: str) -> None:
        size = torch.tensor([len(body)], dtype=torch.int64)
        sends = [(size, size_tag), (torch.frombuffer(bytearray(body), dtype=torch.uint8), tag)]
        works = [self._begin_send(peer, message, tag) for message, tag in sends]
        for work, _ in works:
            self._messages.wait(work, peer, task=task)

    def _receive(
        self,
        peer: int,
        into: torch.Tensor,
        tag: int,
        task: str,
        *,
        limit: timedelta | None = None,
    ) -> torch.Tensor:
        work = self._group.backend.recv([into], peer, tag)
        self._messages.wait(work, peer, task=task, limit=limit)
        return into

    def __repr__(self) -> str:
        serving = [peer for peer, thread in self._threads.items() if thread.is_alive()]
        return f"<Requests, serving ranks {serving}>"
