"""What a contract suite is, and the one that every transport must pass.

Inherit one in a test module and supply its one factory; pytest and unittest find the ``test_``
methods. Where there is no test runner, as inside a rank, `Contract.run_all` calls them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import Empty, SimpleQueue

from bytesched.core import SchedulerCore
from bytesched.order import Leading
from bytesched.policy import Priority
from bytesched.scheduler import Scheduler
from bytesched.task import CommTask
from bytesched.transport import Done, Transport

__all__ = ["Contract", "TransportContract"]


class Contract:
    """A class of ``test_`` methods, each on its own."""

    def run_all(self) -> list[str]:
        """Calls every ``test_`` method, in order of name, and returns the names."""
        names = sorted(name for name in dir(self) if name.startswith("test_"))
        for name in names:
            getattr(self, name)()
        return names


class TransportContract(Contract):
    """What the `Transport` protocol promises.

    Supply `transport`; one that needs more than a range of bytes also supplies `tasks`, and one
    that does not move by itself supplies `settle`.
    """

    #: how long any wait may take
    timeout_s = 20.0

    def transport(self) -> Transport:
        """A new transport, open."""
        raise NotImplementedError

    def tasks(self) -> list[CommTask]:
        """At least four tasks that it can send, planned (their ``index`` is set), WAITING."""
        parts = CommTask("gradients", start_at=0, stop_at=1 << 15).partition(1 << 12)
        for index, part in enumerate(parts):
            part.index = index
        return list(parts)

    def settle(self, transport: Transport) -> None:
        """Lets everything that was started end."""

    def test_every_task_is_done_exactly_once(self) -> None:
        transport, tasks, ends = self.transport(), self.tasks(), _Ends()
        try:
            self._send(transport, tasks, ends)
        finally:
            transport.close()
        ends.check(tasks, times=1)
        assert not ends.errors, f"nothing went wrong, and yet {ends.errors}"

    def test_tasks_are_sent_again_in_every_step(self) -> None:
        transport, tasks, ends = self.transport(), self.tasks(), _Ends()
        try:
            for _ in range(3):
                self._send(transport, tasks, ends)
                for task in tasks:
                    task.notify_finish()
                    task.rearm()
        finally:
            transport.close()
        ends.check(tasks, times=3)
        assert not ends.errors, f"nothing went wrong, and yet {ends.errors}"

    def test_close_ends_what_is_in_flight(self) -> None:
        transport, tasks, ends = self.transport(), self.tasks(), _Ends()
        try:
            for task in tasks:
                _make_sending(task)
                transport.start(task, ends.done)
        finally:
            transport.close()
        ends.wait(len(tasks), self.timeout_s)
        ends.check(tasks, times=1)

    def test_close_is_idempotent(self) -> None:
        unused = self.transport()
        unused.close()
        unused.close()
        transport, ends = self.transport(), _Ends()
        self._send(transport, self.tasks(), ends)
        transport.close()
        transport.close()

    def test_start_after_close_fails(self) -> None:
        transport, task, ends = self.transport(), self.tasks()[0], _Ends()
        transport.close()
        _make_sending(task)
        try:
            transport.start(task, ends.done)
        except Exception:  # noqa: BLE001 - which one is the transport's own business
            assert not ends.all, "it raised and called done as well"
            return
        self.settle(transport)
        ends.wait(1, self.timeout_s)
        assert ends.errors, "a closed transport sent a task"

    def test_no_thread_survives_close(self) -> None:
        before = set(threading.enumerate())
        transport, ends = self.transport(), _Ends()
        self._send(transport, self.tasks(), ends)
        transport.close()
        for thread in set(threading.enumerate()) - before:
            thread.join(self.timeout_s)
            assert not thread.is_alive(), f"{thread} survived close"

    def test_a_scheduler_drains_over_it(self) -> None:
        steps, tasks = 3, self.tasks()
        happened: SimpleQueue[CommTask | BaseException | None] = SimpleQueue()
        transport = _Telling(self.transport(), happened)
        core = SchedulerCore(Leading(Priority()), credit_bytes=2 * tasks[0].nbytes)
        scheduler = Scheduler(core, transport, on_finish=happened.put, on_error=happened.put)
        try:
            for _ in range(steps):
                for task in tasks:
                    _make_ready(task)
                    scheduler.notify_ready(task)
                finished = 0
                while finished < len(tasks):
                    what = _next(happened, self.timeout_s, f"{finished} tasks finished, and then")
                    if what is None:
                        self.settle(transport.inner)
                    elif isinstance(what, BaseException):
                        raise what
                    else:
                        finished += 1
        finally:
            scheduler.close()
        core.validate()
        assert core.idle, core
        assert scheduler.tasks_started == steps * len(tasks), scheduler

    def _send(self, transport: Transport, tasks: Sequence[CommTask], ends: _Ends) -> None:
        expected = len(ends.all) + len(tasks)
        for task in tasks:
            _make_sending(task)
            transport.start(task, ends.done)
        self.settle(transport)
        ends.wait(expected, self.timeout_s)


class _Ends:
    """Every call of ``done``."""

    def __init__(self) -> None:
        self.all: list[tuple[CommTask, BaseException | None]] = []
        self._changed = threading.Condition()

    def done(self, task: CommTask, error: BaseException | None) -> None:
        with self._changed:
            self.all.append((task, error))
            self._changed.notify_all()

    def wait(self, count: int, timeout_s: float) -> None:
        with self._changed:
            ended = self._changed.wait_for(lambda: len(self.all) >= count, timeout_s)
        assert ended, f"{len(self.all)} of {count} sends ended within {timeout_s} s"

    @property
    def errors(self) -> list[BaseException]:
        return [error for _, error in self.all if error is not None]

    def check(self, tasks: Sequence[CommTask], *, times: int) -> None:
        for task in tasks:
            count = sum(ended is task for ended, _ in self.all)
            assert count == times, f"done was called {count} times for {task!r}, not {times}"


class _Telling:
    """A transport that notes (None) whenever a task was started on it."""

    def __init__(
        self, inner: Transport, happened: SimpleQueue[CommTask | BaseException | None]
    ) -> None:
        self.inner = inner
        self._happened = happened

    def start(self, task: CommTask, done: Done) -> None:
        self.inner.start(task, done)
        self._happened.put(None)

    def close(self) -> None:
        self.inner.close()


def _next(
    happened: SimpleQueue[CommTask | BaseException | None], timeout_s: float, so_far: str
) -> CommTask | BaseException | None:
    try:
        return happened.get(timeout=timeout_s)
    except Empty:
        raise AssertionError(f"{so_far} nothing for {timeout_s} s") from None


def _make_ready(task: CommTask) -> None:
    while not task.notify_ready():
        pass


def _make_sending(task: CommTask) -> None:
    _make_ready(task)
    task.start()
