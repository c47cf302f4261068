"""The exchange of a sharded update: sums to their owners; from them, when they have updated, all
else that their owners want the others to have.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from time import perf_counter_ns
from typing import Any

import torch

from bytesched.errors import SchedulerClosed
from bytesched.plugins.c10d.split.exchange import FROM_OWNER, TO_MEASURER, TO_OWNER, Exchange
from bytesched.plugins.c10d.split.gathers import Gather
from bytesched.plugins.c10d.split.lanes import Lanes
from bytesched.plugins.c10d.split.outbox import Outbox
from bytesched.plugins.layout.slots import Slot
from bytesched.task import CommTask

__all__ = ["ShardedExchange"]


class ShardedExchange(Exchange):
    """An exchange whose second phase begins when its user says so, and may be repeated.

    A chunk counts as reduced when the first phase is over: at its owner it is summed, elsewhere its
    gradients have left. Chunks that all ranks sum in turn are gathered as in any exchange. Where
    one rank measures a tensor that has several owners, these may send it their sums in the first
    phase, too: see `tell_measurers`.

    Args:
        spread: called when what was sent of an owned chunk has left.
        gathered: called when a foreign chunk has come.
        rest: those of an exchange.
    """

    def __init__(
        self,
        *rest: Any,
        spread: Callable[[CommTask], None],
        gathered: Callable[[CommTask], None],
        **named: Any,
    ) -> None:
        self._tell_spread = spread
        self._tell_gathered = gathered
        #: what is sent of each owned chunk; and messages of phase two that are not over
        self._staged: dict[int, torch.Tensor] = {}
        #: all of it, or what is rounded in it
        self._leaving: dict[int, torch.Tensor] = {}
        #: of each foreign chunk, what comes rounded
        self._rounded: dict[int, deque[torch.Tensor]] = {}
        self._unspread = self._ungathered = 0
        #: of each other rank, what is sent to it in phase two
        self._lanes: dict[int, Lanes] = {}
        #: owners tell measurers in this round
        self._tells = False
        #: chunks whose sums are on their way from here to who measures them
        self._telling: set[int] = set()
        #: those whose gradients have left here, or whose sums have come, and not both
        self._halves: set[int] = set()
        super().__init__(*rest, **named)
        #: who measures each chunk, where that is not its owner
        self._measurers = {
            chunk.index: measurer
            for chunk in self._plan.chunks
            if (measurer := self._plan.measurer_of(chunk)) is not None
            # What is rounded on its way is not what its owner has.
            and self._packer.memory(chunk) is self._plan.buffers[chunk.index]
        }
        #: of other owners, and measured here
        self._told = [c for c in self._foreign if self._measurers.get(c.index) == self._group.rank]
        for peer, outbox in self._outboxes.items():
            self._lanes[peer] = Lanes(outbox, partial(self._lane_to, peer))

    @property
    def may_tell(self) -> bool:
        """Whether any rank measures what others own; the same on all ranks."""
        return bool(self._measurers)

    def is_told(self, slot: Slot) -> bool:
        """Whether the sums of this round that others own of ``slot`` come here in phase one."""
        foreign = [c for c in slot.chunks if self._plan.owners[c.index] != self._group.rank]
        return self._tells and all(
            self._measurers.get(chunk.index) == self._group.rank for chunk in foreign
        )

    def tell_measurers(self, tells: bool) -> None:
        """From the round on that begins next; on all ranks."""
        with self._changed:
            self._tells = tells

    def expect(self, chunks: Iterable[CommTask], dtype: torch.dtype | None = None) -> None:
        """The owners of ``chunks``, which are others, send them next; front first.

        With a ``dtype``, rounded to that.
        """
        listed = sorted(chunks, key=lambda chunk: chunk.index)
        with self._changed:
            self._ungathered += len(listed)
            for _ in listed:
                self._busy.begins(perf_counter_ns())
        # At once: an owner may wait for these before it sends what is expected already.
        if dtype is not None:
            for chunk in listed:
                memory = torch.empty_like(self._plan.buffers[chunk.index], dtype=dtype)
                self._rounded.setdefault(chunk.index, deque()).append(memory)
        # In the user's thread: a connection that is broken refuses at once, in torch's words.
        self._guarded(partial(self._receive_parameters, listed))

    def _receive_parameters(self, chunks: Sequence[CommTask]) -> None:
        arrived = self._parameters_arrived
        self._gathers.add(
            [self._gather(c, FROM_OWNER, self._expected_memory(c), arrived) for c in chunks]
        )

    def stage(self, chunk: CommTask, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The memory that `spread` sends, once what was sent before has left."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or not self._unsent.get(chunk.index))
            if self._over:
                raise SchedulerClosed(f"{chunk!r} was to be spread after an end")
        if chunk.index not in self._staged:
            buffer = self._plan.buffers[chunk.index]
            # What the others sent has been summed, and no more of it comes before this has left.
            spare = self._incoming[chunk.index, self._peers[0]]
            fits = spare.dtype is buffer.dtype
            self._staged[chunk.index] = spare if fits else torch.empty_like(buffer)
        memory = self._staged[chunk.index]
        if dtype is not None:
            memory = memory.view(dtype)[: memory.numel()]
        self._leaving[chunk.index] = memory
        return memory

    def spread(self, chunk: CommTask, turn: int) -> None:
        """Sends what was staged of ``chunk``, which is owned here, to all others.

        What has a lower ``turn``, which is positive, goes first.
        """
        with self._changed:
            self._unspread += 1
            self._busy.begins(perf_counter_ns())
            self._unsent[chunk.index] = len(self._peers)
            for lanes in self._lanes.values():
                lanes.put(turn, chunk.index, chunk)

    def _lane_to(self, peer: int, is_held: Callable[[], bool]) -> Outbox:
        outbox = self._outbox_to(peer, is_held)
        self._begin_thread(f"bytesched-spread-{peer}", outbox.run)
        return outbox

    def _emptied(self, peer: int) -> None:
        if peer in self._lanes:
            self._lanes[peer].let_go()

    def _wake_all(self) -> None:
        super()._wake_all()
        for lanes in self._lanes.values():
            lanes.wake()

    def _is_idle(self) -> bool:
        return super()._is_idle() and not self._unspread and not self._ungathered

    def _window(self, phase: int) -> int:
        # Those of phase two wait for other ranks' steps, and hold up no sum meanwhile.
        return 2

    # -- the first phase ---------------------------------------------------------------

    def _sums_here(self) -> int:
        return super()._sums_here() + (len(self._told) if self._tells else 0)

    def _sums_of_others(self) -> list[CommTask]:
        told = self._told if self._tells else []
        return sorted([*self._shared_by_others(), *told], key=self._plan.computed)

    def _receive_foreign(self) -> list[Gather]:
        with self._changed:
            chunks = self._awaited.popleft()
        gathers = []
        for chunk in chunks:
            is_shared = self._is_shared(chunk)
            kind, arrived = (
                (FROM_OWNER, self._arrived) if is_shared else (TO_MEASURER, self._sum_arrived)
            )
            gathers.append(self._gather(chunk, kind, self._packer.memory(chunk), arrived))
        return gathers

    def _sum_arrived(self, chunk: CommTask, owner: int, work: Any) -> None:
        self._messages.wait(work, owner, task=chunk.name)
        self._count_sum()
        self._finish_half(chunk)

    def _summed(self, chunk: CommTask) -> None:
        if self._is_shared(chunk):
            super()._summed(chunk)
            return
        # Before its chunk is over: at the last one another round may begin.
        self._count_sum()
        measurer = self._measurers.get(chunk.index) if self._tells else None
        if measurer is None:
            self._finish_phase(chunk)
        else:
            with self._changed:
                self._telling.add(chunk.index)
                self._unsent[chunk.index] = 1
                self._outboxes[measurer].put(TO_OWNER, self._next(), chunk)

    def _count_sum(self) -> None:
        with self._changed:
            self._unsummed -= 1
            is_last = not self._unsummed
        if is_last:
            self._tell_summed()

    def _left_for_owner(self, chunk: CommTask) -> None:
        if self._is_shared(chunk):
            return
        if self._tells and self._measurers.get(chunk.index) == self._group.rank:
            self._finish_half(chunk)
        else:
            self._finish_phase(chunk)

    def _finish_half(self, chunk: CommTask) -> None:
        """Gradients of a chunk that is measured here have left, or their sum has come."""
        with self._changed:
            is_first = chunk.index not in self._halves
            self._halves ^= {chunk.index}
        if not is_first:
            self._finish_phase(chunk)

    def _finish_phase(self, chunk: CommTask) -> None:
        # Parameters may be in its memory already.
        self._finish(chunk, is_received=False)

    def _kind_of_sum(self, chunk: CommTask) -> int:
        return TO_MEASURER if chunk.index in self._telling else FROM_OWNER

    # -- the second --------------------------------------------------------------------

    def _is_shared(self, chunk: CommTask) -> bool:
        return chunk.index in self._plan.shared

    def _expected_memory(self, chunk: CommTask) -> torch.Tensor:
        rounded = self._rounded.get(chunk.index)
        return rounded[-1] if rounded else self._plan.buffers[chunk.index]

    def _spread_memory(self, chunk: CommTask) -> torch.Tensor:
        if self._is_shared(chunk) or chunk.index in self._telling:
            return super()._spread_memory(chunk)
        return self._leaving[chunk.index]

    def _left_for_all(self, chunk: CommTask) -> None:
        if self._is_shared(chunk):
            super()._left_for_all(chunk)
        elif chunk.index in self._telling:
            with self._changed:
                self._telling.remove(chunk.index)
            self._finish_phase(chunk)
        else:
            with self._changed:
                self._unspread -= 1
                self._busy.ends(perf_counter_ns())
                self._changed.notify_all()
            self._tell_spread(chunk)

    def _parameters_arrived(self, chunk: CommTask, owner: int, work: Any) -> None:
        self._messages.wait(work, owner, task=chunk.name)
        with self._changed:
            if rounded := self._rounded.get(chunk.index):
                # Of two, the one that was sent first, whichever of them this thread has waited for.
                self._plan.buffers[chunk.index].copy_(rounded.popleft())
            self._ungathered -= 1
            self._busy.ends(perf_counter_ns())
        self._tell_gathered(chunk)
