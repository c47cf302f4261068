"""What cargo is cut into: pieces of about one size, the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from bytesched.plugins.wave.partitions.partition import Partition
from bytesched.plugins.wave.partitions.routes import Cargo, Route, sends
from bytesched.task import CommTask

__all__ = ["Pieces", "name_of", "tag_of"]

_TAGS_PER_CARGO: Final = 1 << 20


class Pieces:
    """A task for every piece that a rank sends in a step, most urgent first.

    Args:
        partitions: all of the model, by index.
        piece_bytes: about the size of one.
    """

    def __init__(
        self, partitions: Sequence[Partition], rank: int, ranks: int, piece_bytes: int
    ) -> None:
        self._partitions = partitions
        self._piece_bytes = piece_bytes
        #: in the order of their elements
        self.by_route: dict[Route, list[CommTask]] = {}
        #: the route of each one, and the tag of its message
        self.addresses: dict[CommTask, tuple[Route, int]] = {}
        for priority, route in enumerate(sends(rank, ranks)):
            self.by_route[route] = self._cut(route, priority)
        for index, piece in enumerate(self.addresses):
            piece.index = index

    def bounds(self, index: int) -> list[tuple[int, int]]:
        """The elements of each piece of a partition, or of its gradients."""
        return [(piece.start_at, piece.stop_at) for piece in self._parted(index, "", 0)]

    def of(self, cargo: Cargo, index: int, number: int | None = None) -> Iterator[CommTask]:
        """The pieces of this cargo to all ranks that it is sent to, or that piece of each."""
        for route, pieces in self.by_route.items():
            if route[:2] == (cargo, index):
                yield from pieces if number is None else pieces[number : number + 1]

    def _cut(self, route: Route, priority: int) -> list[CommTask]:
        name = f"{name_of(route.cargo, route.partition)} to {route.to}"
        pieces = self._parted(route.partition, name, priority)
        for number, piece in enumerate(pieces):
            self.addresses[piece] = route, tag_of(route.cargo, route.partition, number)
        return pieces

    def _parted(self, index: int, name: str, priority: int) -> list[CommTask]:
        flat = self._partitions[index].flat
        whole = CommTask(
            name,
            start_at=0,
            stop_at=flat.numel(),
            itemsize=flat.element_size(),
            priority=priority,
        )
        return list(whole.partition(self._piece_bytes))


def name_of(cargo: Cargo, index: int) -> str:
    return f"{cargo.name.lower()} {index}"


def tag_of(cargo: Cargo, index: int, number: int) -> int:
    """The tag of a message between two ranks."""
    return (index * len(Cargo) + cargo.value) * _TAGS_PER_CARGO + number + 1
