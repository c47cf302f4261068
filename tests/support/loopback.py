"""Ranks in one process: a wire that is a thread, for tests of all that a session does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLate
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from together import together
from torch import nn

from bytesched.config import Config
from bytesched.errors import PeerLost, SchedulerTimeout
from bytesched.observe import Observers
from bytesched.plugins.planned.beginning import add_optimizer, slots_of, why_whole
from bytesched.plugins.planned.bundles import Slot
from bytesched.plugins.planned.hooked_session import HookedSession
from bytesched.plugins.planned.terms import Terms
from bytesched.plugins.planned.wire import HOST
from bytesched.plugins.proxies.passes import watch_passes
from bytesched.tunable import Setting

T = TypeVar("T")

#: of what hooks hand out, where a test says nothing
_PARTITION_BYTES = 1 << 20


class _ThreadSession(HookedSession):
    """One that lives in a thread, beside those of other ranks."""

    def _watch(self) -> Callable[[], None]:
        return watch_passes(self, thread=threading.get_ident())


@dataclass(frozen=True, eq=False)
class _Part:
    """One rank's part in a sum, which is made in place when all ranks have given theirs."""

    rank: int
    tensor: torch.Tensor
    future: Future[None] = field(default_factory=Future)

    def get_future(self) -> Future[None]:
        return self.future

    def is_completed(self) -> bool:
        return self.future.done()


class Loopback:
    """Ranks that reduce within one process, each in a thread of its own.

    A rank is told of the backward passes of the thread that has wrapped its model; a single one of
    those of all threads. Chunks are reduced one by one on the thread of the wire, in the order in
    which the last rank starts them, unless `hold` keeps them there.

    Args:
        ranks: how many; the gradients of a single one stay as they are, bit for bit.
        timeout_s: of every wait.
    """

    def __init__(self, ranks: int = 1, *, timeout_s: float = 30.0) -> None:
        self.timeout_s = timeout_s
        self.wires = [LoopbackWire(self, rank, ranks) for rank in range(ranks)]
        self._events: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._parts: dict[str, list[_Part]] = {}
        self._held: list[list[_Part]] | None = None
        self._chunk_error: BaseException | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="loopback", daemon=True)
        self._thread.start()

    # -- what a test does --------------------------------------------------------------

    def wrap(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        rank: int = 0,
        find_unused: bool | None = False,
        **fields: Any,
    ) -> HookedSession:
        """A session of ``rank`` for a plain module; ``fields`` are those of Config."""
        config = Config(**fields)
        partition_bytes = config.partition_bytes or _PARTITION_BYTES
        credit_bytes = config.credit_bytes or 2 * partition_bytes
        kind_of_session = HookedSession if len(self.wires) == 1 else _ThreadSession
        session = kind_of_session(
            model,
            Terms(
                slots_of(model, optimizer, kind=Slot),
                config,
                self.wires[rank],
                Observers(),
                Setting(partition_bytes, credit_bytes, config.policy),
            ),
            sync=lambda: True,
            find_unused=find_unused,
        )
        kind = type(optimizer)
        add_optimizer(session, optimizer, kind, why_whole(model, optimizer, kind, config))
        return session

    def run(self, train: Callable[[int], T]) -> list[T]:
        """What ``train(rank)`` returns on every rank, by rank, or raises."""
        return together(train, len(self.wires))

    def hold(self) -> None:
        """From now on no chunk is reduced; numbers that ranks tell each other are."""
        self._events.put(lambda: vars(self).update(_held=[]))

    def release(self) -> None:
        """Chunks that were held are reduced, and those that come."""
        self._events.put(self._release)

    def fail(self, error: BaseException) -> None:
        """The next chunk fails with ``error`` on every rank."""
        self._events.put(lambda: vars(self).update(_chunk_error=error))

    def close(self) -> None:
        """Ends the wire's thread; nothing is reduced any more. Idempotent."""
        self._events.put(None)
        self._thread.join(5.0)

    # -- what wires do -----------------------------------------------------------------

    def add(self, key: str, rank: int, tensor: torch.Tensor, *, is_chunk: bool) -> _Part:
        """Begins the part of ``rank`` in the sum under ``key``; in the largest, if no chunk."""
        part = _Part(rank, tensor)
        self._events.put(lambda: self._add(key, part, is_chunk=is_chunk))
        return part

    def abort(self, error: BaseException) -> None:
        """What is under way, and what comes, ends with ``error``."""
        self._events.put(lambda: self._abort(error))

    # -- the wire's thread -------------------------------------------------------------

    def _run(self) -> None:
        while (event := self._events.get()) is not None:
            event()

    def _add(self, key: str, part: _Part, *, is_chunk: bool) -> None:
        if self._error is not None:
            part.future.set_exception(self._error)
            return
        parts = self._parts.setdefault(key, [])
        parts.append(part)
        if len(parts) < len(self.wires):
            return
        del self._parts[key]
        if not is_chunk:
            _combine(parts, torch.maximum)
        elif self._chunk_error is not None:
            error, self._chunk_error = self._chunk_error, None
            _end(parts, error)
        elif self._held is not None:
            self._held.append(parts)
        else:
            _combine(parts, torch.add)

    def _release(self) -> None:
        held, self._held = self._held or [], None
        for parts in held:
            _combine(parts, torch.add)

    def _abort(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
            for parts in [*self._parts.values(), *(self._held or ())]:
                _end(parts, error)
            self._parts.clear()
            self._held = None


def _combine(parts: list[_Part], combine: Callable[..., torch.Tensor]) -> None:
    total, *others = (part.tensor for part in sorted(parts, key=lambda part: part.rank))
    for tensor in others:
        total = combine(total, tensor)
    for part in parts:
        if part.tensor is not total:
            part.tensor.copy_(total)
    _end(parts, None)


def _end(parts: list[_Part], error: BaseException | None) -> None:
    for part in parts:
        if error is None:
            part.future.set_result(None)
        else:
            part.future.set_exception(error)


class LoopbackWire:
    """One rank of a Loopback (see `planned.wire.Wire`)."""

    has_streams = False
    sees_ends = True
    levels = 1

    def __init__(self, loopback: Loopback, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.timeout_s = loopback.timeout_s
        self._loopback = loopback
        self._told = 0
        self._note = "it has failed"

    def start(self, tensor: torch.Tensor, key: str = "") -> Any:
        return self._loopback.add(f"chunk {key}", self.rank, tensor, is_chunk=True)

    def start_largest(self, numbers: torch.Tensor) -> Any:
        self._told += 1
        return self._loopback.add(f"numbers {self._told}", self.rank, numbers, is_chunk=False)

    def wait(self, work: Any, task: str) -> None:
        try:
            work.future.result(self.timeout_s)
        except TooLate:
            raise SchedulerTimeout(
                f"not all ranks came within {self.timeout_s:g} s", task=task, rank=self.rank
            ) from None

    def wait_left(self, works: Iterable[Any]) -> None:
        for work in works:
            if not work.is_completed():
                self._loopback.abort(PeerLost(f"rank {self.rank} has left"))
                return

    def stream(self) -> int:
        return HOST

    def leave_note(self, text: str) -> None:
        self._note = text

    def abort(self) -> None:
        self._loopback.abort(PeerLost(f"rank {self.rank} gave up: {self._note}"))

    def close(self) -> None:
        pass
