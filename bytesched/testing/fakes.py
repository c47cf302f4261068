"""Test doubles for everything that bytesched talks to, and suites that any of it must pass.

Free of frameworks, of pytest too: the suites are classes with ``test_`` methods.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from bytesched.errors import SchedulerClosed, TransportError
from bytesched.task import CommTask
from bytesched.transport import Done, Transport

__all__ = ["FakeTransport", "FaultPlan"]


class FakeTransport:
    """Sends nothing, remembers what was started, and finishes a task when the test asks for it."""

    def __init__(self) -> None:
        #: every task ever started, in that order
        self.started: list[CommTask] = []
        self.closed = False
        self._in_flight: dict[CommTask, Done] = {}
        self._changed = threading.Condition()

    @property
    def in_flight(self) -> tuple[CommTask, ...]:
        """Started and not ended, oldest first."""
        with self._changed:
            return tuple(self._in_flight)

    def start(self, task: CommTask, done: Done) -> None:
        """Keeps ``done`` until the test ends the task."""
        with self._changed:
            if self.closed:
                raise SchedulerClosed(f"{task!r} was started on a closed transport")
            if task in self._in_flight:
                raise ValueError(f"{task!r} is in flight already")
            self.started.append(task)
            self._in_flight[task] = done
            self._changed.notify_all()

    def wait_for(self, started: int, timeout_s: float = 10.0) -> None:
        """Waits until ``started`` tasks have been started in all; TimeoutError if they are not."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.started) >= started, timeout_s):
                raise TimeoutError(f"{len(self.started)} of {started} tasks were started")

    def finish(self, task: CommTask) -> None:
        """``task``, which is in flight, has been sent."""
        self._end(task, None)

    def finish_next(self) -> CommTask:
        """The oldest task in flight has been sent; returns it."""
        if not (in_flight := self.in_flight):
            raise ValueError("nothing is in flight")
        self._end(in_flight[0], None)
        return in_flight[0]

    def finish_all(self) -> None:
        """All that is in flight now has been sent."""
        for task in self.in_flight:
            self._end(task, None)

    def fail(self, task: CommTask, error: BaseException) -> None:
        """``task``, which is in flight, ended with ``error``."""
        self._end(task, error)

    def close(self) -> None:
        """Tasks in flight fail with SchedulerClosed."""
        with self._changed:
            self.closed = True
        for task in self.in_flight:
            self._end(task, SchedulerClosed(f"{task!r} was in flight on close"))

    def _end(self, task: CommTask, error: BaseException | None) -> None:
        with self._changed:
            done = self._in_flight.pop(task, None)
        if done is None:
            raise ValueError(f"{task!r} is not in flight")
        done(task, error)


@dataclass(frozen=True, slots=True)
class _Fault:
    error: BaseException | None
    at_start: bool


class FaultPlan:
    """Which sends go wrong, and how; readable, and countable afterwards.

    ::

        faults = FaultPlan().fail_at(task=3, step=2).delay_at(task=0, step=1)
        scheduler = Scheduler(core, faults.wrap(transport))
        ...
        assert faults.count == 2

    A task is named by its ``index``; its first send is step 0.
    """

    def __init__(self) -> None:
        #: how many of the planned faults have happened
        self.count = 0
        self._faults: dict[tuple[int, int], _Fault] = {}
        self._held: list[tuple[CommTask, Done, BaseException | None]] = []
        self._lock = threading.Lock()

    def fail_at(
        self,
        *,
        task: int,
        step: int,
        error: BaseException | None = None,
        at_start: bool = False,
    ) -> FaultPlan:
        """That send is reported as failed once it has ended, or refused at its start.

        ``error`` is what it fails with, a TransportError unless given.
        """
        message = f"planned fault of task {task} in step {step}"
        return self._plan(task, step, _Fault(error or TransportError(message), at_start))

    def delay_at(self, *, task: int, step: int) -> FaultPlan:
        """The end of that send is not reported before `release` or close."""
        return self._plan(task, step, _Fault(None, at_start=False))

    def release(self) -> None:
        """Reports the ends that were held back so far."""
        with self._lock:
            held, self._held = self._held, []
        for task, done, error in held:
            done(task, error)

    def wrap(self, transport: Transport) -> Transport:
        """``transport`` with these faults; counts its own steps."""
        return _FaultyTransport(self, transport)

    def _plan(self, task: int, step: int, fault: _Fault) -> FaultPlan:
        if (task, step) in self._faults:
            raise ValueError(f"task {task} has a fault in step {step} already")
        self._faults[task, step] = fault
        return self

    def _fault_of(self, task: CommTask, step: int) -> _Fault | None:
        return self._faults.get((task.index, step))

    def _happened(self) -> None:
        with self._lock:
            self.count += 1

    def _hold(self, task: CommTask, done: Done, error: BaseException | None) -> None:
        with self._lock:
            self._held.append((task, done, error))


class _FaultyTransport:
    def __init__(self, plan: FaultPlan, transport: Transport) -> None:
        self._plan = plan
        self._transport = transport
        self._steps: dict[CommTask, int] = {}

    def start(self, task: CommTask, done: Done) -> None:
        step = self._steps.get(task, 0)
        self._steps[task] = step + 1
        fault = self._plan._fault_of(task, step)
        if fault is None:
            self._transport.start(task, done)
            return
        if fault.error is not None and fault.at_start:
            self._plan._happened()
            raise fault.error

        def ended(task: CommTask, error: BaseException | None) -> None:
            self._plan._happened()
            if fault.error is None:
                self._plan._hold(task, done, error)
            else:
                done(task, fault.error)

        self._transport.start(task, ended)

    def close(self) -> None:
        self._transport.close()
        self._plan.release()
