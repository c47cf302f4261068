"""What a session says about itself, and which line of a script it blames where little crosses."""

from __future__ import annotations

import logging
import sys
from time import perf_counter, perf_counter_ns, sleep
from typing import Any

import pytest
from fake_wire import FakeWire, FakeWork, Run
from torch import Tensor, nn

from bytesched.busy import Busy
from bytesched.observe import Observers
from bytesched.plugins.figures import causes as causes_module
from bytesched.plugins.figures.causes import Causes, place
from bytesched.plugins.figures.meter import Meter
from bytesched.tunable import Setting

MS = 1_000_000


def meter(busy_ns: list[int] | None = None) -> Meter:
    """That of a model with 1000 bytes of gradients."""
    made = Meter(Observers(), 1, (lambda: 0) if busy_ns is None else (lambda: busy_ns[0]))
    made.active(1000, 10, Setting(100, 200))
    return made


def train(meter: Meter, count: int, *crossing_bytes: int) -> Meter:
    """So many rounds, each with a step for each of the numbers of bytes."""
    for _ in range(count):
        meter.round_begins()
        for nbytes in crossing_bytes:
            meter.stepped(nbytes)
    return meter


@pytest.mark.parametrize(("crossing_bytes", "said"), [(0, 1), (10, 1), (500, 0)])
def test_nothing_to_gain_is_said_once(
    crossing_bytes: int, said: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="bytesched"):
        train(meter(), 200, crossing_bytes)
    assert sum("were still in flight at step()" in message for message in caplog.messages) == said


def test_the_share_that_crossed_is_of_rounds_not_of_steps() -> None:
    figures = train(meter(), 4, 250, 250).figures()
    assert figures["barrier_crossed_pct"] == 50.0
    assert figures["iterations"] == 4
    assert figures["steps"] == figures["barrier_crossed_steps"] == 8


def test_rounds_that_went_another_way_do_not_count() -> None:
    busy_ns = [50 * MS]
    ours = meter(busy_ns)
    ours.stepped(0)
    train(ours, 2, 0)
    ours.causes.read("weight", waited_ns=10)
    ours.waited("weight.grad", perf_counter_ns())
    ours.begin_anew()
    ours.round_begins()
    busy_ns[0] += 8 * MS
    ours.stepped(1000)
    train(ours, 1, 300)
    figures = ours.figures()
    assert figures["barrier_crossed_pct"] == 65.0
    assert figures["comm_ms"] == 4.0
    assert figures["exposed_comm_ms"] == 0.0
    assert figures["overlap_pct"] == 100.0
    assert figures["steps"] == 5
    assert not ours.causes.worst


def test_what_arrives_before_step_is_called_hidden_only_if_it_is() -> None:
    busy_ns = [0]
    ours = train(meter(busy_ns), 1, 0)
    busy_ns[0] = 10 * MS
    assert "is hidden behind backward" in str(ours.figures()["reason"])
    ours.waited("fc", perf_counter_ns() - 20 * MS)
    assert ours.figures()["reason"] == "the rest had arrived before step()"


def test_who_waits_for_next_to_nothing_is_not_blamed() -> None:
    busy_ns = [0]
    ours = train(meter(busy_ns), 1, 0)
    busy_ns[0] = 100 * MS
    for waited_ms, reason in ((3, "is hidden behind backward"), (4, "reads all gradients")):
        ours.waited("weight", ours.moment() - waited_ms * MS)
        ours.causes.read("weight", waited_ms * MS)
        assert reason in str(ours.figures()["reason"])


def test_time_under_way_is_counted_once() -> None:
    busy = Busy()
    busy.begins(100)
    busy.begins(200)
    busy.ends(300)
    busy.ends(400)
    busy.begins(1000)
    busy.ends(1100)
    assert busy.total_ns == 400
    busy.begins(perf_counter_ns() - MS)
    assert busy.total_ns >= 400 + MS


def line() -> int:
    """That of the caller."""
    return sys._getframe(1).f_lineno


def test_what_is_waited_for_is_named_with_the_line_that_asks_for_it() -> None:
    reading, asking = Causes(5), Causes(5)
    reading.read("weight", waited_ns=10)
    asking.asked(waited_ns=10)
    here = line()
    assert reading.worst == f"the script reads weight.grad (test_figures.py:{here - 2})"
    assert asking.worst == (
        f"the script asks for norms of all gradients (test_figures.py:{here - 1})"
    )
    assert place() == ("", f"test_figures.py:{line()}")


def test_nothing_is_blamed_that_was_there_or_when_looking_took_too_long() -> None:
    there, late = Causes(1), Causes(1)
    there.read("weight", waited_ns=0)
    late._spent_ns = causes_module._BUDGET_NS + 1
    late.read("weight", waited_ns=10)
    assert there.worst == late.worst == ""


class Late(FakeWire):
    """However slow the machine is, as much is left to wait for as was hidden."""

    began_s = 0.0

    def start(self, tensor: Tensor, key: str = "") -> FakeWork:
        self.began_s = self.began_s or perf_counter()
        return super().start(tensor, key)

    def wait(self, work: FakeWork, task: str) -> None:
        if self.began_s and not work.is_over:
            sleep(max(0.02, perf_counter() - self.began_s))
            self.began_s = 0.0
            self.let()
        super().wait(work, task)


def nothing(run: Run) -> None:
    pass


def clip(run: Run) -> None:
    nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)


def log(run: Run) -> None:
    float(run.model.module[0].weight.grad.sum())


def hook(run: Run) -> None:
    run.optimizer.register_step_pre_hook(lambda *_: None)


def wait(run: Run) -> None:
    run.session.wait_reduced()


@pytest.mark.parametrize(
    ("before_step", "options", "reason"),
    [
        (nothing, {}, ""),
        (clip, {}, "clip_grad_norm_ reads all gradients ({line})"),
        (log, {}, "the script reads module.0.weight.grad ({line})"),
        (hook, {}, "a pre-hook of step() was registered after the wrap"),
        (nothing, {"cross": False}, "cross_barrier is off"),
        (wait, {}, "the rest had arrived before step()"),
    ],
)
def test_where_little_crosses_the_reason_is_named(
    before_step: Any, options: dict[str, Any], reason: str
) -> None:
    run = Run(Late(), is_plain=True, **options)
    run.train()
    for _ in range(4):
        run.optimizer.zero_grad()
        run.backward()
        before_step(run)
        run.optimizer.step()
    run.session.flush()
    line = f"test_figures.py:{before_step.__code__.co_firstlineno + 1}"
    assert run.session.stats()["reason"] == reason.format(line=line)
    run.close()
