"""Which chunks are under way: the only count of what is complete."""

from __future__ import annotations

from collections.abc import Iterable

from bytesched.errors import InvalidTransition
from bytesched.task import CommTask

__all__ = ["UnderWay"]


class UnderWay:
    """Chunks of a round that are not summed, that come from their owners, that leave for others.

    Everything else that waits, asks here: for all chunks, or for those of a gradient or a bundle.
    Written under one lock; a question may be asked without it, and is answered at once. `Round`
    looks at the two containers themselves, where a call for each tensor or bundle would count.
    """

    def __init__(self) -> None:
        #: chunks that are not summed
        self.unsummed: set[CommTask] = set()
        #: how many messages of each come from its owner, and leave for all others
        self.coming: dict[CommTask, int] = {}
        self._leaving: dict[CommTask, int] = {}

    def begin(self, chunks: Iterable[CommTask]) -> None:
        """A round begins: these are to be summed."""
        if not self.is_empty:
            raise InvalidTransition(f"a round begins on {self!r}")
        self.unsummed.update(chunks)

    def expect(self, coming: Iterable[CommTask], leaving: Iterable[CommTask]) -> None:
        """Other ranks send something of each of ``coming``, this one of each of ``leaving``."""
        for counts, chunks in ((self.coming, coming), (self._leaving, leaving)):
            for chunk in chunks:
                counts[chunk] = counts.get(chunk, 0) + 1

    def summed(self, chunk: CommTask) -> None:
        """The sum of ``chunk`` is complete."""
        if chunk not in self.unsummed:
            raise InvalidTransition(f"'summed' of {chunk!r}, which is not on its way in {self!r}")
        self.unsummed.remove(chunk)

    def came(self, chunk: CommTask) -> None:
        """A message of ``chunk`` has come."""
        _count_down(self.coming, chunk, "came")

    def left(self, chunk: CommTask) -> None:
        """A message of ``chunk`` has left."""
        _count_down(self._leaving, chunk, "left")

    @property
    def is_empty(self) -> bool:
        """Whether nothing is under way."""
        return not (self.unsummed or self.coming or self._leaving)

    def sums(self, chunks: Iterable[CommTask]) -> bool:
        """Whether any of ``chunks`` is not summed."""
        return not self.unsummed.isdisjoint(chunks)

    def comes(self, chunks: Iterable[CommTask]) -> bool:
        """Whether something of any of ``chunks`` is to come from its owner."""
        return not self.coming.keys().isdisjoint(chunks)

    @property
    def is_coming(self) -> bool:
        """Whether anything is to come from owners."""
        return bool(self.coming)

    def __len__(self) -> int:
        return len(self.unsummed) + len(self.coming) + len(self._leaving)

    def __repr__(self) -> str:
        names = {"to be summed": self.unsummed, "coming": self.coming, "leaving": self._leaving}
        found = [f"{len(chunks)} {name}" for name, chunks in names.items() if chunks]
        return f"<UnderWay {', '.join(found) or 'nothing'}>"


def _count_down(counts: dict[CommTask, int], chunk: CommTask, event: str) -> None:
    if chunk not in counts:
        raise InvalidTransition(f"{event!r} of {chunk!r}, of which nothing is under way")
    if counts[chunk] == 1:
        del counts[chunk]
    else:
        counts[chunk] -= 1
