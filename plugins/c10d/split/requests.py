"""What one rank asks another for or tells it at any time: a thread of the other one answers."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from time import monotonic
from typing import Any, Final

import torch

from bytesched.errors import BytesschedError, TransportError
from bytesched.plugins.c10d.group import PATIENCE_S, Group
from bytesched.plugins.c10d.messages import Messages
from bytesched.plugins.session.lockstep import Place

__all__ = ["Requests"]

#: tags: what comes next and the size of what follows, and that itself
_HEADER, _REQUEST, _ANSWER_SIZE, _ANSWER = range(4)

#: in place of the size of a request: where a rank is
_GOES_ON, _ENDS = -1, -2

#: of a rank that asks
_NOWHERE: Final = Place(0, 0, 0, 0, 0)

#: A request comes whenever the other rank's script asks; the asking one waits with a deadline.
_NO_LIMIT: Final = timedelta(days=365)

_LOOKS_EVERY_S: Final = 0.5


class Requests:
    """Questions and answers of any bytes, between every two ranks; and where each of them is.

    The last place says that a rank will ask no more; a rank may go when all others have said so.

    Args:
        group: only these use it.
        answer: finds what rank asks for; on a thread of its own for each rank.
        heard: called when a rank has announced its place, and whether that is its last one.
        failed: called with the first error.
    """

    def __init__(
        self,
        group: Group,
        *,
        answer: Callable[[bytes], bytes],
        heard: Callable[[int, Place, bool], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._group = group
        self._messages = Messages(group)
        self._answer = answer
        self._heard = heard
        self._failed = failed
        self._closed = False
        #: each guards the questions to one rank
        self._asking = {rank: threading.Lock() for rank in range(group.size) if rank != group.rank}
        #: to each rank, announcements that it has perhaps not received, with what they send; and
        #: how many were received from it
        self._announced: dict[int, deque[Any]] = {peer: deque() for peer in self._asking}
        self._announcements = 0
        self._received = dict.fromkeys(self._asking, 0)
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
                header = self._header(peer, len(question), _NOWHERE)
                self._send(peer, header, _HEADER, question, _REQUEST, task)
                (size,) = self._receive(peer, torch.empty(1, dtype=torch.int64), _ANSWER_SIZE, task)
                body = torch.empty(int(size), dtype=torch.uint8)
                return self._receive(peer, body, _ANSWER, task).numpy().tobytes()
            except RuntimeError as error:
                if isinstance(error, BytesschedError):
                    raise
                raise self._group.error(error, task=task) from error

    def announce(self, place: Place, is_last: bool) -> None:
        """Tells all others where this rank is. The user's thread; waits for none of them."""
        self._announcements += 1
        for peer, announced in self._announced.items():
            header = self._header(peer, _ENDS if is_last else _GOES_ON, place)
            # A rank that is gone needs none.
            with contextlib.suppress(RuntimeError):
                announced.append(self._begin_send(peer, header, _HEADER))

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
        said = list(self._announced.values())
        self._group.wait_left([work for announced in said for work, _ in list(announced)])
        if any(thread.is_alive() for thread in self._threads.values()):
            self._group.abort()
        for thread in self._threads.values():
            thread.join(PATIENCE_S)
        # What is under way holds the group.
        for announced in self._announced.values():
            announced.clear()

    # -- one thread for each other rank ------------------------------------------------

    def _serve(self, peer: int) -> None:
        try:
            while True:
                header = torch.empty(2 + len(_NOWHERE), dtype=torch.int64)
                self._receive(peer, header, _HEADER, "a request", limit=_NO_LIMIT)
                size, received, *place = header.tolist()
                self._let_go(peer, received)
                if size < 0:
                    self._received[peer] += 1
                    self._heard(peer, Place(*place), size == _ENDS)
                    if size == _ENDS:
                        return
                    continue
                question = torch.empty(size, dtype=torch.uint8)
                self._receive(peer, question, _REQUEST, "a request")
                answer = self._answer(question.numpy().tobytes())
                length = torch.tensor([len(answer)], dtype=torch.int64)
                self._send(peer, length, _ANSWER_SIZE, answer, _ANSWER, "an answer")
        except Exception as error:  # noqa: BLE001 - it must reach the user's thread
            if not self._closed:
                known = isinstance(error, BytesschedError) or not isinstance(error, RuntimeError)
                self._failed(error if known else self._group.error(error))

    def _header(self, peer: int, size: int, place: Place) -> torch.Tensor:
        return torch.tensor([size, self._received[peer], *place], dtype=torch.int64)

    def _let_go(self, peer: int, received: int) -> None:
        """So many announcements have come to ``peer``: of no others the memory is read."""
        announced = self._announced[peer]
        while not self._closed and len(announced) > self._announcements - received:
            work, _ = announced.popleft()
            self._messages.wait(work, peer, task="an announcement")

    def _begin_send(self, peer: int, message: torch.Tensor, tag: int) -> Any:
        return self._group.send(message, peer, tag), message

    def _send(
        self, peer: int, head: torch.Tensor, head_tag: int, body: bytes, tag: int, task: str
    ) -> None:
        sends = [(head, head_tag), (torch.frombuffer(bytearray(body), dtype=torch.uint8), tag)]
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
        work = self._group.receive(into, peer, tag)
        self._messages.wait(work, peer, task=task, limit=limit)
        return into

    def __repr__(self) -> str:
        serving = [peer for peer, thread in self._threads.items() if thread.is_alive()]
        return f"<Requests, serving ranks {serving}>"
