"""What ranks tell each other of the gradients that they own: one number for each tensor."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import torch

from bytesched.errors import BytesschedError
from bytesched.plugins.c10d.group import Group
from bytesched.plugins.c10d.messages import Messages

__all__ = ["Answers"]

#: above those of chunks
_TAG: Final = 1 << 16

#: round, question, signature, whether the round goes on
_HEADER: Final = 4

_PATIENCE_S: Final = 5.0


class Answers:
    """Answers to numbered questions of a round, from every other rank.

    A rank answers when its own script asks; so a rank that asks alone gets no answer, and has to
    find out by itself. Between two rounds nothing is under way: every rank ends each of its rounds.

    Args:
        group: of the exchange.
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
            self._send(torch.zeros(_HEADER + self._values, dtype=torch.float64))

    @property
    def is_open(self) -> bool:
        """Whether questions of this round may still be asked."""
        return self._is_open

    def give(self, question: int, signature: int, values: torch.Tensor) -> None:
        """Sends this rank's answer to all others; 0 where it owns nothing."""
        header = torch.tensor([self._round, question, signature, 1], dtype=torch.float64)
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

    def lost(self) -> BaseException | None:
        """The error of a message that is waited for and cannot come, if there is one."""
        return self._messages.lost()

    def close(self) -> None:
        """Ends the threads; the group has been aborted if a round was open."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(_PATIENCE_S)

    def _send(self, message: torch.Tensor) -> None:
        for peer in self._peers:
            try:
                work = self._group.backend.send([message], peer, _TAG)
            except RuntimeError as error:
                raise self._group.error(error, task="a norm of all gradients") from error
            self._group.wait_message(work, task="a norm of all gradients")

    def _receive_from(self, peer: int) -> None:
        """A thread for each other rank."""
        number = 0
        while self._has_begun(number := number + 1):
            try:
                while True:
                    message = torch.empty(_HEADER + self._values, dtype=torch.float64)
                    work = self._group.backend.recv([message], peer, _TAG)
                    self._messages.wait(work, peer, task="a norm of all gradients")
                    if not message[_HEADER - 1]:
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

    def _keep(self, peer: int, message: torch.Tensor) -> None:
        key = int(message[0]), int(message[1]), int(message[2])
        with self._changed:
            self._found.setdefault(key, {})[peer] = message[_HEADER:]
        self._arrived()
