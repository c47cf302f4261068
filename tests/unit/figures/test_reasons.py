"""The reason that the figures give where little crosses the barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter
from typing import Any
from unittest.mock import patch

import pytest
from loopback import Loopback
from looped import TIMEOUT_S, Training
from torch import nn

STEPS = 4


@pytest.fixture
def loopback() -> Iterator[Loopback]:
    loopback = Loopback(timeout_s=TIMEOUT_S)
    yield loopback
    loopback.close()


def reason(loopback: Loopback, before_step: Callable[[Training], object], **fields: Any) -> str:
    """What the figures say of a training whose gradients are late."""
    training = Training(loopback, **fields)
    assert training.session is not None
    meter = training.session._meter
    moment = meter.moment

    def begins_to_wait(releases: list[threading.Timer], began_s: float) -> int:
        found = moment()
        if not releases:
            # However slow the machine is, as much is left to wait for as was hidden.
            late_s = max(0.02, perf_counter() - began_s)
            releases.append(threading.Timer(late_s, loopback.release))
            releases[0].start()
        return found

    training.train()
    for _ in range(STEPS):
        loopback.hold()
        began_s = perf_counter()
        training.backward()
        releases: list[threading.Timer] = []
        with patch.object(meter, "moment", partial(begins_to_wait, releases, began_s)):
            before_step(training)
            training.optimizer.step()
        begins_to_wait(releases, began_s)
        releases[0].join()
    training.flush()
    said = str(training.session.stats()["reason"])
    training.session.close()
    return said


def test_a_line_that_reads_all_gradients_is_named(loopback: Loopback) -> None:
    def clip(training: Training) -> None:
        nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)

    line = clip.__code__.co_firstlineno + 1
    assert reason(loopback, clip) == f"clip_grad_norm_ reads all gradients (test_reasons.py:{line})"


def test_a_line_that_reads_one_gradient_is_named(loopback: Loopback) -> None:
    def log(training: Training) -> None:
        float(training.model[0].weight.grad.sum())

    line = log.__code__.co_firstlineno + 1
    assert reason(loopback, log).endswith(f"reads 0.weight.grad (test_reasons.py:{line})")


def test_a_hook_in_front_of_the_step_is_named(loopback: Loopback) -> None:
    def hook(training: Training) -> None:
        training.optimizer.register_step_pre_hook(lambda *_: None)

    assert reason(loopback, hook) == "a pre-hook of step() was registered after the wrap"


def test_a_setting_is_named(loopback: Loopback) -> None:
    said = reason(loopback, lambda training: None, cross_barrier=False)
    assert said == "cross_barrier is off"


def test_nothing_is_explained_where_much_crosses(loopback: Loopback) -> None:
    assert reason(loopback, lambda training: None) == ""


def test_what_was_waited_for_in_front_of_step_is_not_called_hidden(loopback: Loopback) -> None:
    def wait(training: Training) -> None:
        assert training.session is not None
        training.session.wait_reduced()

    assert reason(loopback, wait) == "the rest had arrived before step()"
