"""What one worker has under way with its store: begun, waited for, and what it has cost."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from time import monotonic, perf_counter_ns
from typing import Any

from bytesched.config import Config
from bytesched.errors import SchedulerTimeout, in_one_line
from bytesched.kvstore.pipes import Chunk, Pipes
from bytesched.kvstore.protocol import KVStore
from bytesched.observe import Observers
from bytesched.urgency import URGENCY

from .key_slots import KeySlot, fill, plain

__all__ = ["Transfers"]

log = logging.getLogger("bytesched")

_WORST = 8


class Transfers:
    """Pushes and pulls of keys, in chunks, through two pipes.

    Args:
        credit_bytes: most bytes on their way in each pipe.
    """

    def __init__(
        self, store: KVStore, config: Config, observers: Observers, *, credit_bytes: int
    ) -> None:
        self._rank = store.rank
        self._timeout_s = config.timeout_s
        self._observers = observers
        self.credit_bytes = credit_bytes
        self._changed = threading.Condition()
        #: whose each chunk is
        self._slots: dict[Chunk, KeySlot] = {}
        #: chunks whose push has not ended
        self._pushing = 0
        self._wait_ns: Counter[str] = Counter()
        #: the first error, which is final
        self.error: BaseException | None = None
        self._pipes = Pipes(
            store,
            policy=config.policy,
            credit_bytes=credit_bytes,
            on_pushed=self._pushed,
            on_pulled=self._pulled,
            on_error=self._fail,
            observers=observers,
        )

    @property
    def chunk_count(self) -> int:
        """Of all keys."""
        return len(self._slots)

    def add(self, slot: KeySlot) -> None:
        """One more key; nothing is under way."""
        for chunk in slot.chunks:
            self._slots[chunk] = slot
            self._pipes.add(chunk)

    def push(self, slot: KeySlot, value: Any) -> None:
        """Begins to push ``value``, of which a copy is made."""
        with self._changed:
            fill(slot.flat, plain(value).reshape(-1))
            slot.is_pushed = True
            for chunk in slot.chunks:
                self._pushing += 1
                self._pipes.push(chunk)

    def pull(self, slot: KeySlot, out: Any) -> None:
        """Fills ``out`` when the value is here."""
        with self._changed:
            slot.out = plain(out)
            slot.missing = set(slot.chunks)
            for chunk in slot.chunks:
                self._pipes.ask(chunk)
            if not slot.chunks:
                self._fill(slot)

    def stop(self) -> None:
        """Closes the pipes; what is under way never ends. Idempotent."""
        self._pipes.close()

    def end(self) -> None:
        """What is under way ends, for the sake of the other workers; then as `stop`."""
        try:
            for slot in set(self._slots.values()):
                self.wait_for(slot)
            self.wait_pushed()
        except Exception as error:  # noqa: BLE001 - nobody is left to raise it to
            log.error("a wrapped store that was dropped: %s", in_one_line(error))
        self.stop()
        self._observers.close()

    def figures(self, steps: int) -> dict[str, int | float]:
        """Times per step, so far."""
        pushes, pulls = self._pipes.pushes, self._pipes.pulls
        started = pushes.tasks_started + pulls.tasks_started
        found: dict[str, int | float] = {
            "exposed_comm_ms": sum(self._wait_ns.values()) / 1e6 / steps,
            "push_ms": pushes.busy_ns / 1e6 / steps,
            "pull_ms": pulls.busy_ns / 1e6 / steps,
            "scheduler_cpu_us_per_chunk": (pushes.cpu_ns + pulls.cpu_ns) / 1e3 / max(started, 1),
        }
        for name, ns in self._wait_ns.most_common(_WORST):
            found[f"wait_ms/{name}"] = ns / 1e6 / steps
        return found

    # -- waiting -----------------------------------------------------------------------

    def wait_for(self, slot: KeySlot) -> None:
        """Returns when the pull of ``slot`` has ended, if one is under way."""
        if slot.out is None:
            return
        began_ns = perf_counter_ns()
        self._wait_until(lambda: slot.out is None, f"the pull of key {slot.key!r}")
        now_ns = perf_counter_ns()
        self._wait_ns[str(slot.key)] += now_ns - began_ns
        if self._observers:
            self._observers.on_span("wait", str(slot.key), began_ns, now_ns)

    def wait_pushed(self) -> None:
        """Returns when every push has ended."""
        self._wait_until(lambda: not self._pushing, "all pushes")

    def _wait_until(self, done: Callable[[], bool], what: str) -> None:
        if URGENCY.is_held:
            with URGENCY.waiting():
                return self._wait_until(done, what)
        deadline = monotonic() + self._timeout_s
        with self._changed:
            while not done():
                if self.error is not None:
                    raise self.error.with_traceback(None)
                left_s = deadline - monotonic()
                if left_s <= 0:
                    raise SchedulerTimeout(
                        f"waited {self._timeout_s:g} s for {what}",
                        rank=self._rank,
                        story=self._pipes.story(),
                    )
                self._changed.wait(left_s)

    # -- the pipes ---------------------------------------------------------------------

    def _pushed(self, chunk: Chunk) -> None:
        with self._changed:
            self._pushing -= 1
            self._changed.notify_all()

    def _pulled(self, chunk: Chunk) -> None:
        with self._changed:
            slot = self._slots[chunk]
            slot.missing.discard(chunk)
            if not slot.missing:
                self._fill(slot)

    def _fill(self, slot: KeySlot) -> None:
        """The value of ``slot`` is there; with the lock held."""
        fill(slot.out, slot.flat.reshape(slot.shape))
        slot.out = None
        slot.is_pushed = False
        self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()
