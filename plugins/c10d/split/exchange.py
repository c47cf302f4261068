"""The split all-reduce over Gloo: slices to their owners, and sums back from them.

Gloo's own reduce-scatter and all-gather take as long as its all-reduce; exchanged by sends and
receives, each phase moves half of its bytes in half of its time. Messages have tags, so
ranks need not agree on an order.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from time import perf_counter_ns
from typing import Any, Final

import torch

from bytesched.busy import Busy
from bytesched.errors import BytesschedError, SchedulerClosed
from bytesched.observe import Observers
from bytesched.plugins.c10d.group import PATIENCE_S, Group
from bytesched.plugins.c10d.messages import Messages
from bytesched.plugins.c10d.split.gathers import Gather, Gathers
from bytesched.plugins.c10d.split.outbox import Outbox
from bytesched.plugins.layout.packing import Packer
from bytesched.plugins.layout.plan import Plan
from bytesched.plugins.proxies.spans import span
from bytesched.plugins.session.carrier import Traffic
from bytesched.task import CommTask

__all__ = ["FROM_OWNER", "TO_MEASURER", "TO_OWNER", "Exchange"]

#: messages to one rank that are under way: one on the wire, one that follows it. One of phase two
#: is alone while backward computes: what is to be summed must not wait for more than one.
_WINDOW: Final = 2

#: what messages have: gradients, sums on their way to all ranks, and to one that measures them
TO_OWNER, FROM_OWNER, TO_MEASURER = range(3)


class Exchange:
    """One rank's part in the two phases of every chunk.

    In the first, every rank sends each chunk to its owner, which sums it in the order of the ranks:
    the same bits wherever chunks are cut. In the second, owners send the sums, front chunks first.
    Messages of the first phase go before those of the second, which fill the link when there are
    none.

    Args:
        group: only this carrier uses it.
        plan: cut by owners.
        packer: of the plan.
        reduced: called when the sum of a chunk is in the arena.
        summed: called after the last sum of a round that this rank makes in phase one.
        failed: called with the first error.
    """

    def __init__(
        self,
        group: Group,
        plan: Plan,
        packer: Packer,
        *,
        reduced: Callable[[CommTask], None],
        summed: Callable[[], None],
        failed: Callable[[BaseException], None],
        observers: Observers,
    ) -> None:
        self._group = group
        self._plan = plan
        self._packer = packer
        self._reduced = reduced
        self._tell_summed = summed
        self._failed = failed
        self._observers = observers
        self._messages = Messages(group)
        self._peers = [rank for rank in range(group.size) if rank != group.rank]
        #: in the order of the forward pass
        self._owned = [c for c in plan.chunks if plan.owners[c.index] == group.rank]
        self._foreign = [c for c in plan.chunks if plan.owners[c.index] != group.rank]
        #: what the other ranks send of each chunk that this rank owns
        self._incoming = {
            (chunk.index, peer): torch.empty_like(packer.memory(chunk))
            for chunk in self._owned
            for peer in self._peers
        }
        #: guards what follows, but for reads of single numbers; over it, outboxes and gathers have
        #: conditions of their own, so that a chunk wakes no thread that it does not concern
        self._lock = lock = threading.RLock()
        self._changed = threading.Condition(lock)
        #: rounds begun, and chunks of the current one that were submitted, are not summed here
        #: and not reduced
        self._round = 0
        self._submitted: set[int] = set()
        self._unsummed = 0
        self._left = 0
        #: owned here and submitted, in that order, which is about that of the others
        self._to_sum: deque[CommTask] = deque()
        #: of each owned chunk, the sends of its sum that have not ended
        self._unsent: dict[int, int] = {}
        self._outboxes = {peer: self._outbox_to(peer, lambda: False) for peer in self._peers}
        #: chunks whose receives are to begin, front first, round by round
        self._awaited: deque[list[CommTask]] = deque()
        self._sequence = 0
        self._started_ns: dict[int, int] = {}
        #: sums, and what else is on its way to or from this rank
        self._busy = Busy()
        self._chunks = self._nbytes = 0
        self._closed = False
        self._error: BaseException | None = None
        self._gathers = Gathers(
            lock,
            is_over=lambda: self._over,
            has_begun=lambda: bool(self._awaited),
            receive=self._receive_foreign,
        )
        threads: list[tuple[str, Callable[[], None]]] = [
            ("bytesched-sums", self._sum_owned),
            ("bytesched-gathers-front", self._gathers.run_front),
            ("bytesched-gathers-back", self._gathers.run_back),
        ]
        for peer, outbox in self._outboxes.items():
            threads.append((f"bytesched-send-{peer}", outbox.run))
        self._threads: list[threading.Thread] = []
        for name, run in threads:
            self._begin_thread(name, run)

    def _begin_thread(self, name: str, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=self._guarded, args=(run,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _outbox_to(self, peer: int, is_held: Callable[[], bool]) -> Outbox:
        return Outbox(
            self._lock,
            is_over=lambda: self._over,
            window=self._window,
            begin=partial(self._send, peer),
            end=partial(self._sent, peer),
            is_held=is_held,
            emptied=partial(self._emptied, peer),
        )

    @property
    def traffic(self) -> Traffic:
        return Traffic(self._busy.total_ns, self._chunks, self._nbytes)

    @property
    def is_summed(self) -> bool:
        """Whether the sums of this round that this rank measures are in the arena."""
        return self._unsummed == 0

    def lost(self) -> BaseException | None:
        """The error of a message that is waited for and cannot come, if there is one."""
        return self._messages.lost()

    def submit(self, chunk: CommTask) -> None:
        chunk.start()
        now_ns = perf_counter_ns()
        with self._changed:
            if self._closed:
                raise SchedulerClosed(f"{chunk!r} was submitted after close")
            if not self._submitted:
                self._round += 1
                self._unsummed = self._sums_here()
                self._left = len(self._plan.chunks)
                self._changed.notify_all()
                if awaited := self._sums_of_others():
                    self._awaited.append(awaited)
                    self._gathers.wake()
            self._submitted.add(chunk.index)
            self._started_ns[chunk.index] = now_ns
            self._busy.begins(now_ns)
            owner = self._plan.owners[chunk.index]
            if owner == self._group.rank:
                self._to_sum.append(chunk)
                self._changed.notify_all()
            else:
                self._outboxes[owner].put(TO_OWNER, self._next(), chunk)
        if self._observers:
            self._observers.on_flow("s", chunk.index, "backward", now_ns)

    def story(self) -> str:
        with self._changed:
            return (
                f"  round {self._round}: {len(self._submitted)} of {len(self._plan.chunks)} chunks "
                f"submitted, {self._unsummed} to be summed here, {self._left} not reduced"
            )

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            is_idle = self._is_idle()
            self._wake_all()
        if not is_idle:
            self._group.abort()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(PATIENCE_S)

    # -- the carrier's threads ---------------------------------------------------------

    def _guarded(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:  # noqa: BLE001 - it must reach the user's thread
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        with self._changed:
            if self._closed or self._error is not None:
                return
            self._error = error
            self._wake_all()
        known = isinstance(error, BytesschedError) or not isinstance(error, RuntimeError)
        self._failed(error if known else self._group.error(error))

    def _wake_all(self) -> None:
        """It is over. Under the lock."""
        self._changed.notify_all()
        self._gathers.wake()
        for outbox in self._outboxes.values():
            outbox.wake()

    def _begun(self, round_number: int) -> bool:
        """Waits until a round has begun; false if there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._round >= round_number)
            return not self._over

    def _is_idle(self) -> bool:
        """Whether nothing is under way. Under the lock."""
        return not self._submitted

    @property
    def _over(self) -> bool:
        return self._closed or self._error is not None

    def _sum_owned(self) -> None:
        """Phase one: receives what is owned here, and sums it."""
        number = 0
        while self._begun(number := number + 1):
            works = {
                key: self._receive(memory, key[1], key[0], TO_OWNER)
                for key, memory in self._incoming.items()
            }
            for _ in self._owned:
                chunk = self._next_submitted()
                if chunk is None:
                    return
                for peer in self._peers:
                    self._messages.wait(works[chunk.index, peer], peer, task=chunk.name)
                self._sum(chunk)
                self._summed(chunk)

    def _next_submitted(self) -> CommTask | None:
        """Waits for the next chunk that is owned here; None if there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._to_sum)
            return None if self._over else self._to_sum.popleft()

    def _sum(self, chunk: CommTask) -> None:
        own = self._packer.pack(chunk)
        parts = [
            own if rank == self._group.rank else self._incoming[chunk.index, rank]
            for rank in range(self._group.size)
        ]
        total = parts[0]
        for part in parts[1:-1]:
            total = total.add_(part) if total is not own else torch.add(total, part)
        torch.add(total, parts[-1], out=own)
        # The arena has the sum from here on: norms are taken of it while it is being sent.
        self._packer.receive(chunk)

    def _summed(self, chunk: CommTask) -> None:
        first = TO_OWNER if chunk.index in self._plan.shared else FROM_OWNER
        with self._changed:
            self._unsummed -= 1
            self._unsent[chunk.index] = len(self._peers)
            for outbox in self._outboxes.values():
                place = self._next() if first == TO_OWNER else chunk.index
                outbox.put(first, place, chunk)
            is_last = not self._unsummed
        if is_last:
            self._tell_summed()

    def _sums_of_others(self) -> list[CommTask]:
        """The chunks of a round whose sums are received."""
        return [*self._shared_by_others(), *self._owned_by_others()]

    def _shared_by_others(self) -> list[CommTask]:
        """Those of them that come in the first phase."""
        shared = [chunk for chunk in self._foreign if chunk.index in self._plan.shared]
        return sorted(shared, key=self._plan.computed)

    def _owned_by_others(self) -> list[CommTask]:
        return [chunk for chunk in self._foreign if chunk.index not in self._plan.shared]

    def _sums_here(self) -> int:
        """How many sums of a round this rank measures."""
        return len(self._owned)

    def _receive_foreign(self) -> list[Gather]:
        """Phase two: receives what other owners send in this round."""
        with self._changed:
            chunks = self._awaited.popleft()
        return [self._gather(c, FROM_OWNER, self._packer.memory(c), self._arrived) for c in chunks]

    def _gather(
        self,
        chunk: CommTask,
        kind: int,
        memory: torch.Tensor,
        arrived: Callable[[CommTask, int, Any], None],
    ) -> Gather:
        """Begins to receive what its owner sends of ``chunk``."""
        # It sends after it has all that this rank sends from the same memory.
        owner = self._plan.owners[chunk.index]
        return partial(arrived, chunk, owner, self._receive(memory, owner, chunk.index, kind))

    def _spread_memory(self, chunk: CommTask) -> torch.Tensor:
        """What is sent of a chunk that is owned here."""
        return self._packer.memory(chunk)

    def _arrived(self, chunk: CommTask, owner: int, work: Any) -> None:
        self._messages.wait(work, owner, task=chunk.name)
        self._finish(chunk)

    def _send(self, peer: int, chunk: CommTask) -> Any:
        is_sum = self._plan.owners[chunk.index] == self._group.rank
        with span("bytesched::send"):
            memory = self._spread_memory(chunk) if is_sum else self._packer.pack(chunk)
            tag = _tag(chunk.index, self._kind_of_sum(chunk) if is_sum else TO_OWNER)
            return self._group.backend.send([memory], peer, tag)

    def _kind_of_sum(self, chunk: CommTask) -> int:
        """Of the message that is sent of a chunk that is owned here."""
        return FROM_OWNER

    def _window(self, phase: int) -> int:
        """How many messages there may be under way with the next one, which is of ``phase``."""
        is_urgent = phase == TO_OWNER or len(self._submitted) == len(self._plan.chunks)
        return _WINDOW if is_urgent else 1

    def _emptied(self, peer: int) -> None:
        """Nothing waits to be sent to ``peer`` any more. Under the lock."""

    def _sent(self, peer: int, work: Any, chunk: CommTask) -> None:
        """Waits until a message has left; if it was the last of a sum, its memory is free."""
        self._messages.wait(work, peer, task=chunk.name)
        if self._plan.owners[chunk.index] != self._group.rank:
            self._left_for_owner(chunk)
            return
        with self._changed:
            self._unsent[chunk.index] -= 1
            if self._unsent[chunk.index]:
                return
        self._left_for_all(chunk)

    def _left_for_owner(self, chunk: CommTask) -> None:
        """The message of phase one has left; that of phase two is still to come."""

    def _left_for_all(self, chunk: CommTask) -> None:
        """The messages of phase two have left."""
        self._finish(chunk)

    def _finish(self, chunk: CommTask, *, is_received: bool = True) -> None:
        """Nobody else needs the memory of ``chunk``, and its sum is here, if it is received."""
        now_ns = perf_counter_ns()
        with self._changed:
            if is_received:
                self._packer.receive(chunk)
            self._packer.let_go(chunk)
            chunk.notify_finish()
            chunk.rearm()
            self._chunks += 1
            self._nbytes += chunk.nbytes
            began_ns = self._started_ns.pop(chunk.index)
            self._left -= 1
            self._busy.ends(now_ns)
            if not self._left:
                self._submitted.clear()
        if self._observers:
            args = {"bytes": chunk.nbytes, "chunk": chunk.index}
            self._observers.on_span("send", chunk.name, began_ns, now_ns, args)
        self._reduced(chunk)

    def _receive(self, memory: torch.Tensor, peer: int, index: int, kind: int) -> Any:
        return self._group.backend.recv([memory], peer, _tag(index, kind))

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence

    def __repr__(self) -> str:
        return f"<Exchange rank {self._group.rank} of {self._group.size}, {self.story()}>"


def _tag(index: int, kind: int) -> int:
    return 3 * index + kind
