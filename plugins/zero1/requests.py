"""What one rank asks another for or tells all others at any time, whatever their scripts do.

What is short travels around a ring: every rank hears from the one before it alone, in one thread,
and passes on to the one after it, until each message is back. Gloo's ``recv_anysource`` would need
no ring, but a wait for it does not end when connections break: neither where the other rank dies
nor where this one gives up. What is long goes from rank to rank.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from time import monotonic
from typing import Any, Final

import torch

from bytesched.errors import BytesschedError, TransportError

from ..routes.groups.group import PATIENCE_S, Group
from ..routes.groups.messages import Messages
from .lockstep import Place

__all__ = ["Requests"]

#: tags: what goes around, a question, the size of its answer, and that itself
_WORD, _QUESTION, _ANSWER_SIZE, _ANSWER = range(1, 5)

#: what a word says: where its rank is, that this is its last place, that it asks for something, or
#: that it has an answer
_GOES_ON, _ENDS, _ASKS, _HAS = range(4)

#: of a word that is for all
_ALL: Final = -1

#: of a rank that asks
_NOWHERE: Final = Place(0, 0, 0, 0, 0)

#: from whom, to whom, what, and the size of a question
_HEADER: Final = 4

#: A word comes whenever another rank's script says something; who asks waits with a deadline.
_NO_LIMIT: Final = timedelta(days=365)

_LOOKS_EVERY_S: Final = 0.5


class Requests:
    """Questions and answers of any bytes, between every two ranks; and where each of them is.

    The last place says that a rank will ask no more; a rank may go when all others have said so.

    Args:
        group: only these use their tags of it.
        asked: called with a rank and its question, which `answer` answers some time.
        heard: called when a rank has announced its place, and whether that is its last one.
        failed: called with the first error.
    """

    def __init__(
        self,
        group: Group,
        *,
        asked: Callable[[int, bytes], None],
        heard: Callable[[int, Place, bool], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._group = group
        self._messages = Messages(group)
        self._asked = asked
        self._heard = heard
        self._failed = failed
        self._closed = False
        self._before = (group.rank - 1) % group.size
        self._after = (group.rank + 1) % group.size
        #: one question at a time to each rank
        self._asking = threading.Lock()
        #: guards what follows: what was sent to the next rank since the last word of this rank that
        #: is back, with its memory; of none after that is it known here whether it has left
        self._sending = threading.Lock()
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()
        #: to each rank, answers that it has perhaps not received
        self._given: dict[int, deque[list[Any]]] = {}
        #: whose last word has come, this rank's too when it is back
        self._ended: set[int] = set()
        self._thread = threading.Thread(target=self._listen, name="bytesched-ring", daemon=True)
        self._thread.start()

    def ask(self, questions: Mapping[int, bytes], *, task: str) -> Iterator[tuple[int, bytes]]:
        """The answers of ranks to their questions. On a daemon thread. Raises an error of ours."""
        with self._asking:
            try:
                asked = []
                for rank, question in questions.items():
                    self._say(rank, _ASKS, _NOWHERE, len(question))
                    asked.append((rank, self._begin_send(rank, _bytes_of(question), _QUESTION)))
                for rank, (work, _) in asked:
                    (size,) = self._receive(
                        rank, torch.empty(1, dtype=torch.int64), _ANSWER_SIZE, task
                    )
                    body = torch.empty(int(size), dtype=torch.uint8)
                    answer = self._receive(rank, body, _ANSWER, task).numpy().tobytes()
                    self._messages.wait(work, rank, task=task)
                    self._say(rank, _HAS, _NOWHERE)
                    yield rank, answer
            except RuntimeError as error:
                if isinstance(error, BytesschedError):
                    raise
                raise self._group.error(error, task=task) from error

    def answer(self, rank: int, answer: bytes) -> None:
        """Sends ``rank`` what it has asked for first, of what was not answered yet. Any thread."""
        size = torch.tensor([len(answer)], dtype=torch.int64)
        # Not waited for: it may be about to receive that of another rank, which waits for this one.
        with contextlib.suppress(RuntimeError), self._sending:
            sends = [
                self._begin_send(rank, size, _ANSWER_SIZE),
                self._begin_send(rank, _bytes_of(answer), _ANSWER),
            ]
            self._given.setdefault(rank, deque()).append(sends)

    def announce(self, place: Place, is_last: bool) -> None:
        """Tells all others where this rank is. The user's thread; waits for none of them."""
        # A rank that is gone needs none.
        with contextlib.suppress(RuntimeError):
            self._say(_ALL, _ENDS if is_last else _GOES_ON, place)

    def wait_ended(self, limit_s: float) -> list[int]:
        """Waits until all others have ended or are gone; returns those that have not in time."""
        deadline_s = monotonic() + limit_s
        while self._thread.is_alive() and monotonic() < deadline_s and self.lost() is None:
            self._thread.join(max(0.0, min(_LOOKS_EVERY_S, deadline_s - monotonic())))
        return sorted(set(range(self._group.size)) - self._ended - {self._group.rank})

    def lost(self) -> TransportError | None:
        """The error of a message that is waited for and cannot come, if there is one."""
        return self._messages.lost()

    def close(self) -> None:
        """Ends the thread, by breaking connections if it still listens. Idempotent.

        The others have heard by then that this rank has ended.
        """
        self._closed = True
        # Taken out: Gloo takes a second wait for a message that never leaves.
        with self._sending:
            given = [send for sends in self._given.values() for pair in sends for send in pair]
            under_way = [*self._sent, *given]
            self._sent.clear()
            self._given.clear()
        self._group.wait_left([work for work, _ in under_way])
        if self._thread.is_alive():
            self._group.abort()
        self._thread.join(PATIENCE_S)
        # What is under way holds the group.
        under_way.clear()
        given.clear()

    # -- a thread ----------------------------------------------------------------------

    def _listen(self) -> None:
        try:
            while len(self._ended) < self._group.size:
                word = torch.empty(_HEADER + len(_NOWHERE), dtype=torch.int64)
                self._receive(self._before, word, _WORD, "a word of a rank", limit=_NO_LIMIT)
                if int(word[0]) == self._group.rank:
                    self._is_back(word)
                else:
                    self._send_on(word)
                    self._take(word)
        except Exception as error:  # noqa: BLE001 - it must reach the user's thread
            if not self._closed and not self._group.is_aborted and not self._has_waited_enough():
                known = isinstance(error, BytesschedError) or not isinstance(error, RuntimeError)
                self._failed(error if known else self._group.error(error))

    def _has_waited_enough(self) -> bool:
        """Whether a rank beside this one is gone because it has waited as long as it may."""
        return bool(self._ended & {self._before, self._after}) and not self._group.note()

    def _take(self, word: torch.Tensor) -> None:
        source, to, kind, size, *place = word.tolist()
        if kind in (_GOES_ON, _ENDS):
            if kind == _ENDS:
                self._ended.add(source)
            self._heard(source, Place(*place), kind == _ENDS)
        elif to == self._group.rank and kind == _ASKS:
            question = torch.empty(size, dtype=torch.uint8)
            self._receive(source, question, _QUESTION, "a question")
            self._asked(source, question.numpy().tobytes())
        elif to == self._group.rank:
            with self._sending:
                given = self._given.get(source)
                sends = given.popleft() if given else []
            for work, _ in sends:
                self._messages.wait(work, source, task="an answer")

    def _is_back(self, word: torch.Tensor) -> None:
        """A word of this rank has been everywhere: so has all that it sent on before that."""
        is_own = False
        while not is_own:
            with self._sending:
                if not self._sent:
                    break
                work, sent = self._sent.popleft()
            self._messages.wait(work, self._after, task="a word of a rank")
            is_own = int(sent[0]) == self._group.rank
        if int(word[2]) == _ENDS:
            self._ended.add(self._group.rank)

    def _say(self, to: int, kind: int, place: Place, size: int = 0) -> None:
        self._send_on(torch.tensor([self._group.rank, to, kind, size, *place], dtype=torch.int64))

    def _send_on(self, word: torch.Tensor) -> None:
        # Not waited for: all ranks would wait for the next one.
        with self._sending:
            self._sent.append(self._begin_send(self._after, word, _WORD))

    def _begin_send(self, rank: int, message: torch.Tensor, tag: int) -> tuple[Any, torch.Tensor]:
        return self._group.send(message, rank, tag), message

    def _receive(
        self,
        rank: int,
        into: torch.Tensor,
        tag: int,
        task: str,
        *,
        limit: timedelta | None = None,
    ) -> torch.Tensor:
        work = self._group.receive(into, rank, tag)
        self._messages.wait(work, rank, task=task, limit=limit)
        return into

    def __repr__(self) -> str:
        return f"<Requests of rank {self._group.rank}, ranks {sorted(self._ended)} have ended>"


def _bytes_of(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
