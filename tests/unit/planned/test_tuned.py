"""What rank 0 measures between two words, without other ranks: times."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from fake_cuda import WORK_S, fake_cuda

from bytesched.plugins.planned import tuned as tuned_
from bytesched.plugins.planned.clocks import DeviceClock
from bytesched.plugins.planned.rounds import Traffic
from bytesched.plugins.planned.tuned import Tuned
from bytesched.tunable import Decision, RunFacts, Setting, Steps

UNTUNED = Setting(1 << 20, 2 << 20)


class Asked:
    """A tuner that remembers what it was told, and speaks after so many steps."""

    def __init__(self, steps: int) -> None:
        self._word = Decision(UNTUNED, steps)
        self.told: list[Steps] = []

    def begin(self, facts: RunFacts) -> Decision:
        return self._word

    def decide(self, steps: Steps) -> Decision:
        self.told.append(steps)
        return self._word

    def close(self) -> None:
        pass


def tuned(tuner: Asked, clock: DeviceClock) -> Tuned:
    """One that is alone in its world, after the first round."""
    wire = mock.Mock(rank=0)
    terms = mock.Mock(slots=[], setting=UNTUNED, wire=wire)
    rounds = mock.Mock(traffic=Traffic())
    with mock.patch.object(tuned_, "find_tuner", return_value=tuner):
        alone = Tuned(
            terms, rounds, clock, mock.Mock(), can_stop=False, changed_steps=0, change=mock.Mock()
        )
    with mock.patch.object(alone, "_facts"):
        alone.round_ends()
    return alone


def test_a_step_on_a_gpu_takes_what_the_gpu_computes() -> None:
    """The host is far ahead: by its own clock, these steps would take nothing."""
    with fake_cuda() as device:
        tuner = Asked(3)
        measured = tuned(tuner, DeviceClock(torch.device("cpu")))
        for step, work in enumerate((5, 2, 40, 1)):
            measured.before_forward(step + 1)
            for _ in range(work):
                device.current().queue()
    (steps,) = tuner.told
    assert steps.durations_s == pytest.approx([5 * WORK_S, 2 * WORK_S, 40 * WORK_S])
