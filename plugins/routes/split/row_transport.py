"""Carries hops of rows: reduce-scatter for a sum, all-gather for a spread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from bytesched.task import CommTask

from ...layout.packing import Packer
from ...layout.plan import Plan
from ..groups.group import Group
from ..groups.group_transport import C10dTransport
from ..streams import Streams
from .rows import Row, RowHop, RowMemory

__all__ = ["ParameterHop", "RowTransport"]


class ParameterHop(RowHop):
    """Spreads what owners have staged of chunks of a row, in one turn.

    Args:
        staged: memory for the part of this rank.
        own: the chunk of which this rank has staged something, if there is one.
        foreign: chunks of which other ranks have, and which elements of each are put in place.
    """

    __slots__ = ("foreign", "own", "staged", "turn")

    def __init__(self, row: Row, *, index: int, turn: int) -> None:
        super().__init__(row, index=index, priority=0, is_spread=True)
        self.turn = turn
        self.own: CommTask | None = None
        self.foreign: list[tuple[CommTask, Sequence[slice]]] = []
        self.staged: torch.Tensor | None = None


class RowTransport(C10dTransport):
    """See transport.Transport.

    Args:
        memory: of rows under way.
    """

    def __init__(
        self,
        group: Group,
        plan: Plan,
        packer: Packer,
        streams: Streams,
        memory: RowMemory,
    ) -> None:
        super().__init__([group], packer, streams)
        self._group = group
        self._plan = plan
        self._memory = memory
        #: of each hop under way, its row and its part; of each row that is summed, its part
        self._under_way: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._summed: dict[int, torch.Tensor] = {}

    def _begin(self, task: CommTask) -> Any:
        assert isinstance(task, RowHop)
        if isinstance(task, ParameterHop):
            return self._begin_parameters(task)
        return self._begin_spread(task) if task.is_spread else self._begin_sum(task)

    def _begin_sum(self, hop: RowHop) -> Any:
        row = hop.row
        like = self._packer.memory(row.present()[0])
        memory = self._memory.take(like, row.length, len(row.chunks))
        for chunk, part in self._parts(row, memory, self._packer.pack):
            part.copy_(chunk)
        part = self._memory.take(like, row.length)
        self._under_way[hop.index] = memory, part
        return self._group.reduce_scatter(part, memory)

    def _begin_spread(self, hop: RowHop) -> Any:
        row, part = hop.row, self._summed.pop(hop.row.number)
        memory = self._memory.take(part, row.length, len(row.chunks))
        self._under_way[hop.index] = memory, part
        return self._group.all_gather(memory, part)

    def _begin_parameters(self, hop: ParameterHop) -> Any:
        row = hop.row
        like = self._plan.buffers[row.present()[0].index]
        part = self._memory.take(like, row.length) if hop.staged is None else hop.staged
        memory = self._memory.take(like, row.length, len(row.chunks))
        self._under_way[hop.index] = memory, part
        return self._group.all_gather(memory, part)

    def _receive(self, task: CommTask) -> None:
        assert isinstance(task, RowHop)
        memory, part = self._under_way[task.index]
        row = task.row
        if isinstance(task, ParameterHop):
            for chunk, parts in task.foreign:
                buffer = self._plan.buffers[chunk.index]
                start = self._plan.owners[chunk.index] * row.length
                received = memory[start : start + buffer.numel()]
                for place in parts:
                    buffer[place].copy_(received[place])
        elif task.is_spread:
            for whole, part_ in self._parts(row, memory, self._packer.memory, but_own=True):
                whole.copy_(part_)
            for chunk in row.present():
                if self._plan.owners[chunk.index] != self._group.rank:
                    self._packer.receive(chunk)
        elif (own := row.chunks[self._group.rank]) is not None:
            whole = self._packer.memory(own)
            whole.copy_(part[: whole.numel()])
            self._packer.receive(own)

    def _let_go(self, task: CommTask) -> None:
        assert isinstance(task, RowHop)
        memory, part = self._under_way.pop(task.index)
        row = task.row
        self._memory.give([memory])
        if isinstance(task, ParameterHop) or task.is_spread:
            self._memory.give([part])
            return
        for chunk in row.present():
            self._packer.let_go(chunk)
        if task.followers:
            self._summed[row.number] = part
        else:
            self._memory.give([part])

    def _parts(
        self,
        row: Row,
        memory: torch.Tensor,
        find: Callable[[CommTask], torch.Tensor],
        *,
        but_own: bool = False,
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What ``find`` has of each chunk of ``row``, and where it lies in ``memory``."""
        found = []
        for rank, chunk in enumerate(row.chunks):
            if chunk is not None and not (but_own and rank == self._group.rank):
                whole = find(chunk)
                start = rank * row.length
                found.append((whole, memory[start : start + whole.numel()]))
        return found

    def __repr__(self) -> str:
        return f"<RowTransport rank {self._group.rank}, {len(self._under_way)} hops under way>"
