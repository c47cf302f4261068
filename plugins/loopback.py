"""Ranks in one process: a backend whose wire is a thread, for tests of all that a session does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from time import perf_counter_ns
from typing import Any, TypeVar

import torch
from torch import nn

from bytesched.config import Config
from bytesched.errors import PeerLost, SchedulerClosed, SchedulerTimeout
from bytesched.observe import Observers
from bytesched.task import CommTask
from bytesched.tunable import Setting

from .engine.beginning import add_optimizer, why_whole
from .engine.session import Session
from .layout.packing import Packer
from .layout.plan import Plan
from .layout.slots import Slot
from .routes.carrier import Carrier, Traffic
from .routes.streams import Streams

__all__ = ["Loopback", "LoopbackBackend"]

T = TypeVar("T")

_Ended = Callable[[BaseException | None], None]


@dataclass(frozen=True, eq=False)
class _Part:
    """One rank's part in a sum, which is made in place when all ranks have given theirs."""

    rank: int
    #: on the thread of the wire
    give: Callable[[], torch.Tensor]
    ended: _Ended


class Loopback:
    """Ranks that reduce within one process, each in a thread of its own.

    Chunks are reduced one by one on the thread of the wire, in the order in which the last rank
    submits them, unless `hold` keeps them there.

    Args:
        ranks: how many; the gradients of a single one stay as they are, bit for bit.
        timeout_s: of every wait.
    """

    def __init__(self, ranks: int = 1, *, timeout_s: float = 30.0) -> None:
        self.timeout_s = timeout_s
        self.backends = [LoopbackBackend(self, rank, ranks) for rank in range(ranks)]
        self._events: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._parts: dict[object, list[_Part]] = {}
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
        static_graph: bool = False,
        observers: Observers | None = None,
        **fields: Any,
    ) -> Session:
        """A session of ``rank`` for a plain module; ``fields`` are those of Config."""
        config = Config(**fields)
        session = Session(
            model,
            [
                Slot(name, parameter)
                for name, parameter in model.named_parameters()
                if parameter.requires_grad
            ],
            config,
            backend=self.backends[rank],
            sync=lambda: True,
            find_unused=find_unused,
            static_graph=static_graph,
            observers=Observers() if observers is None else observers,
        )
        kind = type(optimizer)
        add_optimizer(session, optimizer, kind, why_whole(model, optimizer, kind, config))
        return session

    def run(self, train: Callable[[int], T]) -> list[T]:
        """What ``train(rank)`` returns on every rank, by rank; raises its first error."""
        results: dict[int, T] = {}
        errors: list[BaseException] = []

        def call(rank: int) -> None:
            try:
                results[rank] = train(rank)
            except BaseException as error:  # noqa: BLE001 - raised below
                errors.append(error)

        threads = [
            threading.Thread(target=call, args=(rank,)) for rank in range(len(self.backends))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return [results[rank] for rank in range(len(threads))]

    def hold(self) -> None:
        """From now on no chunk is reduced; other sums are."""
        self._events.put(self._hold)

    def release(self) -> None:
        """Chunks that were held are reduced, and those that come."""
        self._events.put(self._release)

    def fail(self, error: BaseException) -> None:
        """The next chunk fails with ``error`` on every rank."""

        def fail() -> None:
            self._chunk_error = error

        self._events.put(fail)

    def close(self) -> None:
        """Ends the wire's thread; nothing is reduced any more. Idempotent."""
        self._events.put(None)
        self._thread.join(5.0)

    # -- what backends do --------------------------------------------------------------

    def add(self, key: object, rank: int, give: Callable[[], torch.Tensor], ended: _Ended) -> None:
        """Adds the part of ``rank`` to the sum under ``key``; a CommTask's index, or a text."""
        self._events.put(lambda: self._add(key, _Part(rank, give, ended)))

    def abort(self, error: BaseException) -> None:
        """What is under way, and what comes, ends with ``error``."""
        self._events.put(lambda: self._abort(error))

    # -- the wire's thread -------------------------------------------------------------

    def _run(self) -> None:
        while (event := self._events.get()) is not None:
            event()

    def _add(self, key: object, part: _Part) -> None:
        if self._error is not None:
            part.ended(self._error)
            return
        parts = self._parts.setdefault(key, [])
        parts.append(part)
        if len(parts) < len(self.backends):
            return
        del self._parts[key]
        if not isinstance(key, int):
            self._sum(parts)
        elif self._chunk_error is not None:
            error, self._chunk_error = self._chunk_error, None
            self._end(parts, error)
        elif self._held is not None:
            self._held.append(parts)
        else:
            self._sum(parts)

    def _sum(self, parts: list[_Part]) -> None:
        try:
            tensors = [part.give() for part in sorted(parts, key=lambda part: part.rank)]
            if len(tensors) > 1:
                total = tensors[0].clone()
                for tensor in tensors[1:]:
                    total += tensor
                for tensor in tensors:
                    tensor.copy_(total)
        except Exception as error:  # noqa: BLE001 - it must reach the ranks
            self._end(parts, error)
        else:
            self._end(parts, None)

    def _hold(self) -> None:
        self._held = []

    def _release(self) -> None:
        held, self._held = self._held or [], None
        for parts in held:
            self._sum(parts)

    def _abort(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
            for parts in [*self._parts.values(), *(self._held or ())]:
                self._end(parts, error)
            self._parts.clear()
            self._held = None

    def _end(self, parts: list[_Part], error: BaseException | None) -> None:
        for part in parts:
            part.ended(error)


class _Sum:
    """The end of a sum, waited for by the rank that began it."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def end(self, error: BaseException | None) -> None:
        self._error = error
        self._ended.set()

    def wait(self, timeout_s: float) -> bool:
        """False if it has not ended within ``timeout_s``; raises its error."""
        has_ended = self._ended.wait(timeout_s)
        if self._error is not None:
            raise self._error
        return has_ended


class LoopbackBackend:
    """One rank of a Loopback (see backend.Backend)."""

    sizes = "all-reduce"
    levels = 1
    wire = "loopback"
    knobs = frozenset({"partition_bytes", "credit_bytes"})
    plans = False

    def __init__(self, loopback: Loopback, rank: int, size: int) -> None:
        self.rank = rank
        self.size = self.divisor = size
        self.timeout_s = loopback.timeout_s
        self._loopback = loopback
        self._note = "it has failed"

    def sum(self, tensor: torch.Tensor, key: str) -> _Sum:
        work = _Sum()
        self._loopback.add(key, self.rank, lambda: tensor, work.end)
        return work

    def reduce(self, chunk: CommTask, packed: torch.Tensor) -> _Sum:
        return self.sum(packed, f"chunk {chunk.index}")

    def wait(self, work: Any, *, task: str = "") -> None:
        if not work.wait(self.timeout_s):
            raise SchedulerTimeout(
                f"not all ranks came within {self.timeout_s:g} s", task=task, rank=self.rank
            )

    def carrier(
        self,
        plan: Plan,
        packer: Packer,
        streams: Streams,
        setting: Setting,
        *,
        reduced: Callable[[CommTask], None],
        failed: Callable[[BaseException], None],
        observers: Observers,
    ) -> Carrier:
        return _LoopbackCarrier(self._loopback, self.rank, packer, reduced, failed)

    def timeout(self, message: str, story: Callable[[], str]) -> SchedulerTimeout:
        return SchedulerTimeout(message, rank=self.rank, story=story().splitlines())

    def leave_note(self, text: str) -> None:
        self._note = text

    def abort(self) -> None:
        self._loopback.abort(PeerLost(f"rank {self.rank} gave up: {self._note}"))

    def close(self) -> None:
        pass


class _LoopbackCarrier:
    """Chunks in the order in which they are submitted (see carrier.Carrier)."""

    order = "loopback"

    def __init__(
        self,
        loopback: Loopback,
        rank: int,
        packer: Packer,
        reduced: Callable[[CommTask], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._loopback = loopback
        self._rank = rank
        self._packer = packer
        self._reduced = reduced
        self._failed = failed
        self._closed = self._has_failed = False
        self._busy_ns = self._chunks = self._nbytes = 0

    @property
    def traffic(self) -> Traffic:
        return Traffic(self._busy_ns, self._chunks, self._nbytes)

    def submit(self, chunk: CommTask) -> None:
        if self._closed:
            raise SchedulerClosed(f"{chunk!r} was submitted after close")
        began_ns = perf_counter_ns()

        def give() -> torch.Tensor:
            chunk.start()
            return self._packer.pack(chunk)

        def ended(error: BaseException | None) -> None:
            if error is not None:
                if not self._has_failed:
                    self._has_failed = True
                    self._failed(error)
                return
            self._packer.receive(chunk)
            self._packer.let_go(chunk)
            chunk.notify_finish()
            chunk.rearm()
            self._chunks += 1
            self._nbytes += chunk.nbytes
            self._busy_ns += perf_counter_ns() - began_ns
            self._reduced(chunk)

        self._loopback.add(chunk.index, self._rank, give, ended)

    def change(self, setting: Setting) -> None:
        pass

    def story(self) -> str:
        return f"{self._chunks} chunks reduced"

    def close(self) -> None:
        self._closed = True
