"""What holds up who hands chunks to the carrier that schedules."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from bytesched.observe import Observers
from bytesched.order import Leading, ReadyQueue
from bytesched.plugins.routes.scheduled import ScheduledCarrier
from bytesched.policy import Priority
from bytesched.scheduler import InTurn, Scheduler
from bytesched.task import CommTask
from bytesched.transport import Done
from bytesched.tunable import Setting

TIMEOUT_S = 100.0


class Slow:
    """A transport that takes until `gate` opens to begin a chunk, and ends it at once."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.began_on: list[str] = []

    def start(self, task: CommTask, done: Done) -> None:
        self.began_on.append(threading.current_thread().name)
        assert self.gate.wait(TIMEOUT_S), "who submits waits for what starts"
        done(task, None)

    def close(self) -> None:
        pass


class Alone:
    """An ordering of one rank (see scheduled.Ordering)."""

    order = "its own"

    def __init__(self, queue: ReadyQueue) -> None:
        self._queue = queue

    def queue(self) -> ReadyQueue:
        return self._queue

    def window_bytes(self, credit_bytes: int) -> int:
        return credit_bytes

    def bind(self, scheduler: Scheduler) -> None:
        pass

    def round_ends(self) -> None:
        pass

    def change(self, chunks: Sequence[CommTask], setting: Setting) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_chunk_that_starts_at_once_does_not_hold_up_backward() -> None:
    transport, reduced = Slow(), threading.Semaphore(0)
    errors: list[BaseException] = []
    chunks = [CommTask(f"c{i}", start_at=4 * i, stop_at=4 * i + 4, priority=i) for i in range(2)]
    for index, chunk in enumerate(chunks):
        chunk.index = index
    carrier = ScheduledCarrier(
        chunks,
        transport,
        Alone(Leading(Priority())),
        credit_bytes=16,
        reduced=lambda _: reduced.release(),
        failed=errors.append,
        observers=Observers(),
        events=InTurn(),
    )
    for chunk in chunks:
        chunk.notify_ready()
        carrier.submit(chunk)
    transport.gate.set()
    for _ in chunks:
        assert reduced.acquire(timeout=TIMEOUT_S), errors
    carrier.close()
    assert threading.current_thread().name not in transport.began_on
