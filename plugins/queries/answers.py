"""What ranks tell each other of the gradients that they own: one number for each tensor.

One thread takes what all others say. The messages of a round are known beforehand, answers to its
questions in their order and an end: so it waits for one rank after the other, and nothing is found
before all have said it. Gloo's ``recv_anysource`` would tell which one is next, but a wait for it
does not end when connections break: neither where the other rank dies nor where this one gives up.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

import torch

from bytesched.errors import BytesschedError

from ..routes.groups.group import PATIENCE_S, Group
from ..routes.groups.messages import Messages

__all__ = ["Answers"]

_TAG: Final = 0

#: question, signature, whether the round goes on
_HEADER: Final = 3

#: Receives from each rank that are begun with a round: more than a script has questions. What a
#: rank says before it goes is taken, however long others are silent.
_AHEAD: Final = 9

#: An answer may be as late as the script is; whoever needs one waits with a deadline.
_NO_LIMIT: Final = timedelta(days=365)

_TASK: Final = "a norm of all gradients"


@dataclass
class _Found:
    """What other ranks have answered to one question."""

    total: torch.Tensor
    ranks: int = 0
    signatures: set[int] = field(default_factory=set)


class Answers:
    """Answers to numbered questions of a round, from every other rank.

    A rank answers when its own script asks; so a rank that asks alone gets no answer, and needs
    whole gradients. Where every rank has ended a round, nothing is under way before the next.

    Args:
        group: only these answers use their tag of it.
        values: how many numbers an answer has; of two ranks, one says 0 in each place.
        arrived: called when all other ranks have answered a question, or one never will.
        failed: called with the first error.
    """

    def __init__(
        self,
        group: Group,
        values: int,
        *,
        arrived: Callable[[], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._group = group
        self._messages = Messages(group)
        self._arrived = arrived
        self._failed = failed
        self._values = values
        self._changed = threading.Condition()
        self._round = 0
        self._is_open = False
        self._closed = False
        #: sends of this round and of the one before that may be under way, with what they send
        self._sent: list[tuple[Any, torch.Tensor]] = []
        self._sent_before: list[tuple[Any, torch.Tensor]] = []
        #: by round and question
        self._found: dict[tuple[int, int], _Found] = {}
        #: by round, how many questions a rank that has ended it has answered, at least
        self._answered: dict[int, int] = {}
        # The next one first: every rank is the first that some thread waits for.
        self._peers = [(group.rank + d) % group.size for d in range(1, group.size)]
        self._coming: dict[int, deque[tuple[Any, torch.Tensor]]] = {p: deque() for p in self._peers}
        self._thread = threading.Thread(target=self._receive, name="bytesched-answers", daemon=True)
        self._thread.start()

    def begin_round(self) -> None:
        """Questions are of a new round. The user's thread."""
        self.end_round()
        # Every rank has begun the last round, and so receives what belongs to the one before.
        # Each once: Gloo takes a second wait for a message that never leaves.
        while self._sent_before:
            work, _ = self._sent_before.pop(0)
            self._group.wait_message(work, task=_TASK)
        self._sent_before, self._sent = self._sent, []
        with self._changed:
            self._round += 1
            self._is_open = True
            for key in [key for key in self._found if key[0] < self._round]:
                del self._found[key]
            for number in [number for number in self._answered if number < self._round]:
                del self._answered[number]
            self._changed.notify_all()

    def end_round(self) -> None:
        """No more questions of this round are answered by this rank. The user's thread."""
        if self._is_open:
            self._is_open = False
            self._send(torch.zeros(_HEADER + self._values, dtype=torch.float64, device="cpu"))

    @property
    def is_open(self) -> bool:
        """Whether questions of this round may still be asked."""
        return self._is_open

    def give(self, question: int, signature: int, values: torch.Tensor) -> None:
        """Sends this rank's answer to all others; 0 where it owns nothing."""
        header = torch.tensor([question, signature, 1], dtype=torch.float64, device="cpu")
        self._send(torch.cat([header, values]))

    def total(self, question: int, signature: int, own: torch.Tensor) -> torch.Tensor | None:
        """``own`` and the answers of all others, added up; None if one is missing."""
        with self._changed:
            found = self._found.get((self._round, question))
            if found is None or found.ranks < len(self._peers) or found.signatures != {signature}:
                return None
            return own + found.total

    def is_missing(self, question: int, signature: int) -> bool:
        """Whether another rank has ended the round, or asked otherwise: `total` stays None."""
        with self._changed:
            if question >= self._answered.get(self._round, question + 1):
                return True
            found = self._found.get((self._round, question))
            return found is not None and not found.signatures <= {signature}

    def lost(self) -> BaseException | None:
        """The error of a message that is waited for and cannot come, if there is one."""
        return self._messages.lost()

    def close(self) -> None:
        """Ends the thread, when the others have what this rank said. Idempotent.

        Each takes it when it has begun the round, whatever its script does meanwhile. The thread
        ends by itself where all ranks have ended the round; where one has not, connections are
        broken after a while, which harms no rank that has what this one said.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._group.wait_left([work for work, _ in (*self._sent_before, *self._sent)])
        self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            self._group.abort()
            self._thread.join(PATIENCE_S)
        # What is under way holds the group.
        self._sent.clear()
        self._sent_before.clear()
        self._coming.clear()

    def _send(self, message: torch.Tensor) -> None:
        # Not waited for: a rank receives when it has begun the round, too.
        for peer in self._peers:
            # A rank that is gone needs no answer; where its gradients are missing, that is noticed.
            with contextlib.suppress(RuntimeError):
                self._sent.append((self._group.send(message, peer, _TAG), message))

    # -- a thread ----------------------------------------------------------------------

    def _receive(self) -> None:
        number = 0
        try:
            while self._has_begun(number := number + 1):
                for peer in self._peers:
                    while len(self._coming[peer]) < _AHEAD:
                        self._expect(peer)
                goes_on, question = self._peers, 0
                while goes_on:
                    goes_on = [peer for peer in goes_on if self._take(peer, number, question)]
                    self._arrived()
                    question += 1
        except (BytesschedError, RuntimeError) as error:
            if not self._closed and not self._group.is_aborted:
                known = isinstance(error, BytesschedError)
                self._failed(error if known else self._group.error(error))

    def _has_begun(self, number: int) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._round >= number)
            return not self._closed

    def _expect(self, peer: int) -> None:
        """Begins to receive one more message of ``peer``."""
        message = torch.empty(_HEADER + self._values, dtype=torch.float64, device="cpu")
        work = self._group.receive(message, peer, _TAG)
        self._coming[peer].append((work, message))

    def _take(self, peer: int, number: int, question: int) -> bool:
        """Waits for what ``peer`` says next in round ``number``; whether it goes on in that.

        It has answered all questions before ``question``.
        """
        if not self._coming[peer]:
            self._expect(peer)
        work, message = self._coming[peer].popleft()
        self._messages.wait(work, peer, task=_TASK, limit=_NO_LIMIT)
        goes_on = bool(message[_HEADER - 1])
        with self._changed:
            if goes_on:
                key = number, int(message[0])
                if key not in self._found:
                    self._found[key] = _Found(torch.zeros(self._values, dtype=torch.float64))
                found = self._found[key]
                found.total += message[_HEADER:]
                found.ranks += 1
                found.signatures.add(int(message[1]))
            else:
                self._answered[number] = min(question, self._answered.get(number, question))
        if not goes_on:
            # Those who have asked more need not wait for the others.
            self._arrived()
        return goes_on
