"""A rank in one process, for tests of all that a session does: its wire ends sums when told."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLate
from typing import Any

import torch
from torch import nn

from bytesched.config import Config
from bytesched.errors import PeerLost, SchedulerTimeout
from bytesched.observe import Observers
from bytesched.plugins.planned.beginning import add_optimizer, slots_of, why_whole
from bytesched.plugins.planned.bundles import Slot
from bytesched.plugins.planned.hooked_session import HookedSession
from bytesched.plugins.planned.terms import Terms
from bytesched.plugins.planned.wire import HOST
from bytesched.tunable import Setting

#: of what hooks hand out, where a test says nothing
_PARTITION_BYTES = 1 << 20


class _Work(Future[None]):
    """A sum of one rank's part alone, which is as it was."""

    def get_future(self) -> Future[None]:
        return self

    def is_completed(self) -> bool:
        return self.done()

    def end(self, error: BaseException | None) -> None:
        self.set_result(None) if error is None else self.set_exception(error)


class Loopback:
    """The wire of a single rank (see `planned.wire.Wire`): gradients stay as they are, to the bit.

    Chunks are reduced at once, unless `hold` keeps them.

    Args:
        timeout_s: of every wait.
    """

    rank, size, levels = 0, 1, 1
    has_streams = False
    sees_ends = True

    def __init__(self, *, timeout_s: float = 30.0) -> None:
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        self._held: list[_Work] = []
        self._holds = self._is_closed = False
        self._chunk_error: BaseException | None = None
        self._error: BaseException | None = None
        self._note = "it has failed"

    # -- what a test does --------------------------------------------------------------

    def wrap(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        find_unused: bool | None = False,
        **fields: Any,
    ) -> HookedSession:
        """A session for a plain module; ``fields`` are those of Config."""
        config = Config(**fields)
        partition_bytes = config.partition_bytes or _PARTITION_BYTES
        setting = Setting(
            partition_bytes, config.credit_bytes or 2 * partition_bytes, config.policy
        )
        slots = slots_of(model, optimizer, kind=Slot)
        session = HookedSession(
            model,
            Terms(slots, config, self, Observers(), setting),
            sync=lambda: True,
            find_unused=find_unused,
        )
        kind = type(optimizer)
        add_optimizer(session, optimizer, kind, why_whole(model, optimizer, kind, config))
        return session

    def hold(self) -> None:
        """From now on no chunk is reduced; numbers that ranks tell each other are."""
        self._holds = True

    def release(self) -> None:
        """Chunks that were held are reduced, and those that come."""
        if not self._is_closed:
            self._let_go(None, holds=False)

    def fail(self, error: BaseException) -> None:
        """The next chunk fails with ``error``."""
        self._chunk_error = error

    def close(self) -> None:
        """Nothing is reduced any more. Idempotent."""
        self._holds = self._is_closed = True

    def _let_go(self, error: BaseException | None, *, holds: bool) -> None:
        with self._lock:
            held, self._held, self._holds = self._held, [], holds
        for work in held:
            work.end(error)

    # -- what a session does -----------------------------------------------------------

    def start(self, tensor: torch.Tensor, key: str = "") -> Any:
        work, (error, self._chunk_error) = _Work(), (self._chunk_error, None)
        with self._lock:
            if is_held := self._holds and not (error or self._error):
                self._held.append(work)
        if not is_held:
            work.end(error or self._error)
        return work

    def start_largest(self, numbers: torch.Tensor) -> Any:
        work = _Work()
        work.end(self._error)
        return work

    def wait(self, work: Any, task: str) -> None:
        try:
            work.result(self.timeout_s)
        except TooLate:
            raise SchedulerTimeout(
                f"not all ranks came within {self.timeout_s:g} s", task=task, rank=self.rank
            ) from None

    def wait_left(self, works: Iterable[Any]) -> None:
        if not all(work.is_completed() for work in works):
            self._abort(PeerLost("rank 0 has left"))

    def stream(self) -> int:
        return HOST

    def leave_note(self, text: str) -> None:
        self._note = text

    def abort(self) -> None:
        self._abort(PeerLost(f"rank 0 gave up: {self._note}"))

    def _abort(self, error: BaseException) -> None:
        """What is under way, and what comes, ends with ``error``."""
        self._error = self._error or error
        self._let_go(self._error, holds=self._holds)
