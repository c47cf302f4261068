"""The transport contract, passed by the doubles and failed by transports that break it."""

from __future__ import annotations

import threading
from typing import ClassVar

import pytest

from bytesched.errors import SchedulerClosed, TransportError
from bytesched.link.simulation import LinkTransport, ManualClock
from bytesched.task import CommTask
from bytesched.testing import FakeTransport, FaultPlan, TransportContract
from bytesched.transport import Done, Transport


class TestFakeTransport(TransportContract):
    def transport(self) -> Transport:
        return FakeTransport()

    def settle(self, transport: Transport) -> None:
        assert isinstance(transport, FakeTransport)
        transport.finish_all()


class TestLinkTransport(TransportContract):
    clock: ClassVar[ManualClock] = ManualClock()

    def transport(self) -> Transport:
        return LinkTransport(self.clock, bytes_per_s=1e6, overhead_s=1e-3)

    def settle(self, transport: Transport) -> None:
        self.clock.run()


class ThreadedTransport:
    """Ends every task on a thread of its own, as a process group does."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._closed = False

    def start(self, task: CommTask, done: Done) -> None:
        if self._closed:
            raise SchedulerClosed("closed")
        thread = threading.Thread(target=done, args=(task, None))
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        self._closed = True
        for thread in self._threads:
            thread.join()


class TestThreadedTransport(TransportContract):
    def transport(self) -> Transport:
        return ThreadedTransport()


class TestFaultPlanWithoutFaults(TransportContract):
    def transport(self) -> Transport:
        return FaultPlan().fail_at(task=99, step=0).wrap(ThreadedTransport())


class Forgetful(ThreadedTransport):
    def start(self, task: CommTask, done: Done) -> None:
        if task.index != 1:
            super().start(task, done)


class Doubling(ThreadedTransport):
    def start(self, task: CommTask, done: Done) -> None:
        done(task, None)
        super().start(task, done)


class SendsOnce(ThreadedTransport):
    def __init__(self) -> None:
        super().__init__()
        self.sent: set[CommTask] = set()

    def start(self, task: CommTask, done: Done) -> None:
        if task not in self.sent:
            self.sent.add(task)
            super().start(task, done)


class SendsAfterClose(ThreadedTransport):
    def start(self, task: CommTask, done: Done) -> None:
        done(task, None)


class RaisesAndCallsDone(ThreadedTransport):
    def start(self, task: CommTask, done: Done) -> None:
        if self._closed:
            done(task, SchedulerClosed("closed"))
        super().start(task, done)


class DropsInFlight(FakeTransport):
    def close(self) -> None:
        self._in_flight.clear()
        super().close()


class ClosesOnce(ThreadedTransport):
    def close(self) -> None:
        if self._closed:
            raise SchedulerClosed("closed already")
        super().close()


class LeavesAThread(ThreadedTransport):
    def __init__(self) -> None:
        super().__init__()
        self.stop = threading.Event()
        self.left = threading.Thread(target=self.stop.wait, daemon=True)
        self.left.start()


class Failing(ThreadedTransport):
    def start(self, task: CommTask, done: Done) -> None:
        super().start(task, lambda task, _: done(task, TransportError("always")))


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (Forgetful, "test_every_task_is_done_exactly_once"),
        (Forgetful, "test_a_scheduler_drains_over_it"),
        (Doubling, "test_every_task_is_done_exactly_once"),
        (Failing, "test_every_task_is_done_exactly_once"),
        (Failing, "test_a_scheduler_drains_over_it"),
        (SendsOnce, "test_tasks_are_sent_again_in_every_step"),
        (SendsAfterClose, "test_start_after_close_fails"),
        (RaisesAndCallsDone, "test_start_after_close_fails"),
        (DropsInFlight, "test_close_ends_what_is_in_flight"),
        (ClosesOnce, "test_close_is_idempotent"),
        (LeavesAThread, "test_no_thread_survives_close"),
    ],
)
def test_the_contract_is_failed_by(broken: type[Transport], test: str) -> None:
    made: list[Transport] = []

    class Broken(TransportContract):
        timeout_s = 0.2

        def transport(self) -> Transport:
            made.append(broken())
            return made[-1]

    with pytest.raises((AssertionError, SchedulerClosed, TransportError)):
        getattr(Broken(), test)()
    for transport in made:
        if isinstance(transport, LeavesAThread):
            transport.stop.set()
            transport.left.join()


def test_a_contract_runs_without_a_test_runner() -> None:
    names = TestThreadedTransport().run_all()
    assert len(names) == 7
    assert all(name.startswith("test_") for name in names)


def test_a_contract_needs_its_factory() -> None:
    with pytest.raises(NotImplementedError):
        TransportContract().run_all()
