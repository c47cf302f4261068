"""What cargo is cut into: chunks of about one size, the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from bytesched.task import CommTask

from .routes import Cargo, Route, sends
from .stage import Stage

__all__ = ["Chunks", "name_of", "tag_of"]

_TAGS_PER_CARGO: Final = 1 << 20


class Chunks:
    """A task for every chunk that a rank sends in a step, most urgent first.

    Args:
        stages: all of the model, by index.
        chunk_bytes: about the size of one.
    """

    def __init__(self, stages: Sequence[Stage], rank: int, ranks: int, chunk_bytes: int) -> None:
        self._stages = stages
        self._chunk_bytes = chunk_bytes
        #: in the order of their elements
        self.by_route: dict[Route, list[CommTask]] = {}
        #: the route of each one, and the tag of its message
        self.addresses: dict[CommTask, tuple[Route, int]] = {}
        for priority, route in enumerate(sends(rank, ranks)):
            self.by_route[route] = self._cut(route, priority)
        for index, chunk in enumerate(self.addresses):
            chunk.index = index

    def bounds(self, index: int) -> list[tuple[int, int]]:
        """The elements of each chunk of a stage, or of its gradients."""
        return [(chunk.start_at, chunk.stop_at) for chunk in self._chunks_of(index, "", 0)]

    def of(self, cargo: Cargo, index: int, number: int | None = None) -> Iterator[CommTask]:
        """The chunks of this cargo to all ranks that it is sent to, or that chunk of each."""
        for route, chunks in self.by_route.items():
            if route[:2] == (cargo, index):
                yield from chunks if number is None else chunks[number : number + 1]

    def _cut(self, route: Route, priority: int) -> list[CommTask]:
        name = f"{name_of(route.cargo, route.stage)} to {route.to}"
        chunks = self._chunks_of(route.stage, name, priority)
        for number, chunk in enumerate(chunks):
            self.addresses[chunk] = route, tag_of(route.cargo, route.stage, number)
        return chunks

    def _chunks_of(self, index: int, name: str, priority: int) -> list[CommTask]:
        flat = self._stages[index].flat
        whole = CommTask(
            name,
            start_at=0,
            stop_at=flat.numel(),
            itemsize=flat.element_size(),
            priority=priority,
        )
        return list(whole.partition(self._chunk_bytes))


def name_of(cargo: Cargo, index: int) -> str:
    return f"{cargo.name.lower()} {index}"


def tag_of(cargo: Cargo, index: int, number: int) -> int:
    """The tag of a message between two ranks."""
    return (index * len(Cargo) + cargo.value) * _TAGS_PER_CARGO + number + 1
