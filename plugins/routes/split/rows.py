"""Rows: a chunk of each owner, side by side in memory that collectives sum and spread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import TypeAlias

import torch

from bytesched.task import CommTask

from ...layout.packing import Packer
from ...layout.plan import Plan

__all__ = ["Row", "RowCounts", "RowHop", "RowMemory", "hops_of", "rows_of"]


#: of what, where, and how many parts
_Kind: TypeAlias = tuple[torch.dtype, torch.device, int]


class Row:
    """At most one chunk of each owner, in parts of one length: the longest chunk's.

    Args:
        chunks: by owner; None where an owner has no chunk in it.
        is_shared: whether they are of tensors that no rank sums alone.
    """

    def __init__(self, number: int, chunks: Sequence[CommTask | None], *, is_shared: bool) -> None:
        self.number = number
        self.chunks = tuple(chunks)
        self.is_shared = is_shared
        #: elements of a part
        self.length = max(chunk.stop_at - chunk.start_at for chunk in self.present())
        self.itemsize = self.present()[0].itemsize

    def present(self) -> list[CommTask]:
        """Its chunks, by owner."""
        return [chunk for chunk in self.chunks if chunk is not None]

    def __repr__(self) -> str:
        return f"<Row {self.number} of {len(self.present())} chunks, {self.length} elements each>"


class RowHop(CommTask):
    """The sum of a row, or its spread.

    Its bytes are those of an all-reduce that takes as long: half of the row.
    """

    __slots__ = ("is_spread", "row")

    def __init__(self, row: Row, *, index: int, priority: int, is_spread: bool) -> None:
        super().__init__(
            f"{'spread' if is_spread else 'sum'} of row {row.number}, {row.present()[0].name}",
            start_at=0,
            stop_at=max(1, row.length * len(row.chunks) // 2),
            itemsize=row.itemsize,
            priority=priority,
        )
        self.row = row
        self.is_spread = is_spread
        self.index = index


def rows_of(plan: Plan, packer: Packer, ranks: int) -> list[Row]:
    """Every chunk of ``plan``, which is cut by owners, in a row; as backward completes them.

    A row has chunks of one kind, alike in memory and on the wire.
    """
    groups: dict[tuple[object, ...], list[list[CommTask]]] = {}
    for chunk in sorted(plan.chunks, key=plan.computed):
        memory, buffer = packer.memory(chunk), plan.buffers[chunk.index]
        key = (
            memory.dtype,
            buffer.dtype,
            buffer.device,
            plan.kind(chunk),
            chunk.index in plan.shared,
        )
        by_owner = groups.setdefault(key, [[] for _ in range(ranks)])
        by_owner[plan.owners[chunk.index]].append(chunk)
    made = [
        (chunks, key[-1] is True)
        for key, by_owner in groups.items()
        for chunks in zip_longest(*by_owner)
    ]

    def complete(row: tuple[tuple[CommTask | None, ...], bool]) -> tuple[int, int]:
        return max(plan.computed(chunk) for chunk in row[0] if chunk is not None)

    return [
        Row(number, chunks, is_shared=is_shared)
        for number, (chunks, is_shared) in enumerate(sorted(made, key=complete))
    ]


class RowMemory:
    """Memory for rows and for parts of them, used again for whatever length. Any thread.

    As many of each are kept as were ever in use at once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[_Kind, list[torch.Tensor]] = {}
        #: what is in use, by where it begins
        self._taken: dict[int, tuple[_Kind, torch.Tensor]] = {}

    def take(self, like: torch.Tensor, length: int, parts: int = 1) -> torch.Tensor:
        """So many parts of ``length`` elements of the kind of ``like``; they have any value.

        New memory is filled on the current stream, which other streams have to wait for.
        """
        kind, elements = (like.dtype, like.device, parts), length * parts
        with self._lock:
            free = self._free.get(kind)
            whole = free.pop() if free else None
            if whole is None or whole.numel() < elements:
                # What fills up a row travels, too: it shall be a number.
                whole = like.new_zeros(elements)
            self._taken[whole.data_ptr()] = kind, whole
        return whole[:elements]

    def give(self, tensors: Iterable[torch.Tensor]) -> None:
        """Nothing uses these any more."""
        with self._lock:
            for tensor in tensors:
                kind, whole = self._taken.pop(tensor.data_ptr())
                self._free.setdefault(kind, []).append(whole)

    def clear(self) -> None:
        with self._lock:
            self._free.clear()


def hops_of(rows: Sequence[Row]) -> tuple[list[RowHop], list[RowHop]]:
    """The sums of all rows, and the spreads of shared ones, each of which follows its sum."""
    sums, spreads = [], []
    for row in rows:
        hop = RowHop(row, index=row.number, priority=row.number, is_spread=False)
        hop.members = tuple(row.present())
        hop.missing = len(hop.members)
        if row.is_shared:
            number = len(rows) + row.number
            spreads.append(RowHop(row, index=number, priority=number, is_spread=True))
            hop.followers = (spreads[-1],)
        sums.append(hop)
    return sums, spreads


class RowCounts:
    """Which chunks of a round have come, and which rows are summed."""

    def __init__(self, rows: Sequence[Row], sums: Sequence[RowHop]) -> None:
        self._sum_of = {
            chunk.index: hop for row, hop in zip(rows, sums, strict=True) for chunk in row.present()
        }
        self._rows = len(rows)
        #: of this round: chunks that were not submitted, rows that are not summed, and chunks that
        #: were not reported
        self.unsubmitted = self.unsummed = self.unreported = 0

    def begin_round(self) -> None:
        """Every chunk comes once more; none is under way."""
        self.unsubmitted = self.unreported = len(self._sum_of)
        self.unsummed = self._rows

    def submitted(self, chunk: CommTask) -> RowHop | None:
        """The sum that can begin now, if ``chunk`` was the last one of its row."""
        self.unsubmitted -= 1
        hop = self._sum_of[chunk.index]
        return hop if hop.notify_ready() else None

    def summed(self) -> bool:
        """One more row is; whether that was the last one."""
        self.unsummed -= 1
        return not self.unsummed

    def report(self, row: Row, reduced: Callable[[CommTask], None]) -> None:
        """The chunks of ``row`` are reduced, and wait for gradients again."""
        for chunk in row.present():
            chunk.start()
            chunk.notify_finish()
            chunk.rearm()
            self.unreported -= 1
            reduced(chunk)

    @property
    def is_idle(self) -> bool:
        """Whether no other rank waits for the rest of a round."""
        # Before its first chunk, nobody waits for any.
        begun = self.unsubmitted < len(self._sum_of)
        return not (begun and (self.unsubmitted or self.unreported))

    def story(self) -> str:
        """For the message of an error."""
        chunks = len(self._sum_of)
        return (
            f"  {chunks - self.unsubmitted} of {chunks} chunks submitted, {self.unsummed} of "
            f"{self._rows} rows to be summed, {self.unreported} chunks on their way"
        )
