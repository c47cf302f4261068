"""The updater: front bundles first, each update once, errors to where the user waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from laid_out import parameters
from looped import TIMEOUT_S

from bytesched.observe import Observers
from bytesched.plugins.dependency.progress import Progress
from bytesched.plugins.figures.meter import Meter
from bytesched.plugins.layout.slots import Bundle, Job, Slot
from bytesched.plugins.routes.streams import Streams
from bytesched.plugins.update.updater import Updater
from bytesched.round import UNTAKEN, GradientState
from bytesched.testing import Loopback

LARGE = 4 << 20  # bytes: enough for a call of its own


class Recorder:
    """In place of an optimizer: which slots it was to update, call by call."""

    def __init__(self) -> None:
        self.calls: list[list[tuple[dict[str, Any], list[str]]]] = []
        self.error: Exception | None = None
        #: an update begins when this is set
        self.go_on = threading.Event()
        self.go_on.set()
        self.begun = threading.Event()

    def update(self, groups: list[tuple[dict[str, Any], list[Slot]]]) -> None:
        self.begun.set()
        assert self.go_on.wait(TIMEOUT_S)
        if self.error is not None:
            raise self.error
        self.calls.append([(values, [slot.name for slot in slots]) for values, slots in groups])

    @property
    def names(self) -> list[list[str]]:
        return [[name for _, names in groups for name in names] for groups in self.calls]


class Bench:
    """An updater over bundles of one parameter each, as large as in `sizes`."""

    def __init__(self, *sizes: int) -> None:
        self.loopback = Loopback(timeout_s=TIMEOUT_S)
        slots = [
            Slot(f"p{n}", parameter) for n, parameter in enumerate(parameters(*[(1,)] * len(sizes)))
        ]
        for slot in slots:
            slot.state = GradientState.SUMMED
        self.bundles = [Bundle(n, [slots[n]], set(), nbytes) for n, nbytes in enumerate(sizes)]
        self.progress = Progress(self.loopback.backends[0])
        self.updater = Updater(self.progress, Streams(), Meter(Observers(), len(sizes)))
        self.recorder = Recorder()

    def push(self, *bundles: Bundle, lr: float = 0.1, times: int = 1) -> None:
        """Arms what nothing has taken of them, and pushes them together."""
        values = {"lr": lr}
        with self.progress.lock:
            jobs = {
                bundle: [
                    Job(self.recorder, values, [s for s in bundle.slots if s.state in UNTAKEN])
                ]
                for bundle in bundles
            }
            ready, _ = self.progress.round.arm(jobs)
            self.updater.push(bundle for bundle in ready for _ in range(times))

    def wait(self) -> None:
        self.progress.wait(lambda: not any(b.is_outstanding for b in self.bundles), "all updates")

    def close(self) -> None:
        self.recorder.go_on.set()
        self.updater.close()
        self.loopback.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(LARGE, LARGE, LARGE)
    yield bench
    bench.close()


def test_front_bundles_are_updated_first(bench: Bench) -> None:
    front, middle, back = bench.bundles
    bench.push(back, middle, front)
    bench.wait()
    assert bench.recorder.names == [["p0"], ["p1"], ["p2"]]


def test_what_comes_meanwhile_overtakes(bench: Bench) -> None:
    front, middle, back = bench.bundles
    bench.recorder.go_on.clear()
    bench.push(middle)
    assert bench.recorder.begun.wait(TIMEOUT_S)
    bench.push(back)
    bench.push(front)
    bench.recorder.go_on.set()
    bench.wait()
    assert bench.recorder.names == [["p1"], ["p0"], ["p2"]]


def test_small_bundles_that_are_ready_together_are_one_call() -> None:
    bench = Bench(3, 3, LARGE, 3)
    bench.push(*bench.bundles)
    bench.wait()
    bench.close()
    assert bench.recorder.names == [["p0", "p1", "p2"], ["p3"]]


def test_the_hyperparameters_are_those_of_each_step() -> None:
    bench = Bench(3, 3)
    front, back = bench.bundles
    bench.recorder.go_on.clear()
    bench.push(front)
    assert bench.recorder.begun.wait(TIMEOUT_S)
    bench.push(back, lr=0.2)
    # What another optimizer has of it, while it is being updated.
    other = Slot("other", *parameters((1,)))
    other.state = GradientState.SUMMED
    front.slots.append(other)
    bench.push(front, lr=0.3)
    bench.recorder.go_on.set()
    bench.wait()
    bench.close()
    assert bench.recorder.calls == [
        [({"lr": 0.1}, ["p0"])],
        [({"lr": 0.3}, ["other"]), ({"lr": 0.2}, ["p1"])],
    ]


def test_a_bundle_that_is_pushed_twice_is_updated_once(bench: Bench) -> None:
    bench.push(bench.bundles[0], times=2)
    bench.wait()
    bench.push(bench.bundles[1])
    bench.wait()
    assert bench.recorder.names == [["p0"], ["p1"]]


def test_an_error_is_raised_where_the_user_waits(bench: Bench) -> None:
    bench.recorder.error = ArithmeticError("singular")
    bench.push(bench.bundles[0])
    with pytest.raises(ArithmeticError, match="singular"):
        bench.wait()
    assert bench.bundles[0].is_outstanding
    with pytest.raises(ArithmeticError, match="singular"):
        bench.progress.check()


def test_closed_it_leaves_undone_what_was_not_begun(bench: Bench) -> None:
    front, middle, _ = bench.bundles
    bench.recorder.go_on.clear()
    bench.push(front)
    assert bench.recorder.begun.wait(TIMEOUT_S)
    closing = threading.Thread(target=bench.updater.close)
    with bench.progress.lock:
        closing.start()
        bench.recorder.go_on.set()
        # The thread of the updater waits for the lock, and close() for the thread.
        while not bench.updater._closed:
            bench.progress._changed.wait(0.01)
    closing.join(TIMEOUT_S)
    bench.push(middle)
    assert bench.recorder.names == [["p0"]]
    assert middle.is_outstanding
