"""What ranks tell each other of the gradients that they own: one number for each tensor."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from time import monotonic
from typing import Any, Final

import torch

from bytesched.errors import BytesschedError
from bytesched.plugins.c10d.group import PATIENCE_S, Group
from bytesched.plugins.c10d.messages import Messages

__all__ = ["Answers"]

_TAG: Final = 0

#: round, question, signature, whether the round goes on
_HEADER: Final = 4

#: An answer may be as late as the script is; whoever needs one waits with a deadline.
_NO_LIMIT: Final = timedelta(days=365)

_TASK: Final = "a norm of all gradients"


class Answers:
    """Answers to numbered questions of a round, from every other rank.

    A rank answers when its own script asks; so a rank that asks alone gets no answer, and needs
    whole gradients. Where every rank has ended a round, nothing is under way before the next.

    Args:
        group: only these answers use it.
        values: how many numbers an answer has.
        arrived: called when an answer of another rank is there.
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
        #: the last round that each other rank has ended
        self._ended: dict[int, int] = {}
        #: (round, question, signature) -> by rank
        self._found: dict[tuple[int, int, int], dict[int, torch.Tensor]] = {}
        self._peers = [rank for rank in range(group.size) if rank != group.rank]
        self._threads = [
            threading.Thread(
                target=self._receive_from,
                args=(peer,),
                name=f"bytesched-answers-{peer}",
                daemon=True,
            )
            for peer in self._peers
        ]
        for thread in self._threads:
            thread.start()

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
        header = torch.tensor(
            [self._round, question, signature, 1], dtype=torch.float64, device="cpu"
        )
        self._send(torch.cat([header, values]))

    def total(self, question: int, signature: int, own: torch.Tensor) -> torch.Tensor | None:
        """``own`` and the answers of all others, added up; None if one is missing."""
        with self._changed:
            found = self._found.get((self._round, question, signature), {})
            if len(found) < len(self._peers):
                return None
            total = own.clone()
            for values in found.values():
                total += values
            return total

    def is_missing(self, question: int, signature: int) -> bool:
        """Whether another rank has ended the round, or asked otherwise: `total` stays None."""
        with self._changed:
            answered = {
                rank: key[2]
                for key, found in self._found.items()
                if key[:2] == (self._round, question)
                for rank in found
            }
            return any(
                answered[peer] != signature
                if peer in answered
                else self._ended.get(peer, 0) >= self._round
                for peer in self._peers
            )

    def lost(self) -> BaseException | None:
        """The error of a message that is waited for and cannot come, if there is one."""
        return self._messages.lost()

    def close(self) -> None:
        """Ends the threads, when the others have what this rank said. Idempotent.

        Each takes it when it has begun the round, whatever its script does meanwhile. The threads
        end by themselves where all ranks have ended the round; where one has not, connections are
        broken after a while, which harms no rank that has what this one said.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._group.wait_left([work for work, _ in (*self._sent_before, *self._sent)])
        deadline_s = monotonic() + PATIENCE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            self._group.abort()
            for thread in self._threads:
                thread.join(PATIENCE_S)
        # What is under way holds the group.
        self._sent.clear()
        self._sent_before.clear()

    def _send(self, message: torch.Tensor) -> None:
        # Not waited for: a rank receives when it has begun the round, too.
        for peer in self._peers:
            # A rank that is gone needs no answer; where its gradients are missing, that is noticed.
            with contextlib.suppress(RuntimeError):
                self._sent.append((self._group.send(message, peer, _TAG), message))

    def _receive_from(self, peer: int) -> None:
        """A thread for each other rank."""
        number = 0
        while self._has_begun(number := number + 1):
            try:
                while True:
                    message = torch.empty(_HEADER + self._values, dtype=torch.float64, device="cpu")
                    work = self._group.receive(message, peer, _TAG)
                    self._messages.wait(work, peer, task=_TASK, limit=_NO_LIMIT)
                    if not message[_HEADER - 1]:
                        self._end(peer, number)
                        break
                    self._keep(peer, message)
            except (BytesschedError, RuntimeError) as error:
                if not self._closed:
                    known = isinstance(error, BytesschedError)
                    self._failed(error if known else self._group.error(error))
                return

    def _has_begun(self, number: int) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._round >= number)
            return not self._closed

    def _end(self, peer: int, number: int) -> None:
        with self._changed:
            self._ended[peer] = number
        self._arrived()

    def _keep(self, peer: int, message: torch.Tensor) -> None:
        key = int(message[0]), int(message[1]), int(message[2])
        with self._changed:
            self._found.setdefault(key, {})[peer] = message[_HEADER:]
        self._arrived()
