"""What rank 0 measures between two words, without other ranks: times."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from fake_cuda import WORK_S, fake_cuda

from bytesched.plugins.routes.carrier import Traffic
from bytesched.plugins.routes.streams import CudaStreams, Streams
from bytesched.plugins.warmup.retuning import Decisions, Retuning
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


def retuning(tuner: Asked, streams: Streams) -> Retuning:
    """One that is alone in its world, after the warm-up."""
    changing = mock.Mock(is_applied=lambda setting: True)
    decisions = Decisions(tuner, mock.Mock(rank=0), torch.device("cpu"))
    return Retuning(
        decisions,
        decisions.first(mock.Mock(), UNTUNED),
        changing,
        mock.Mock(),
        Traffic,
        streams=streams,
    )


def test_a_step_on_a_gpu_takes_what_the_gpu_computes() -> None:
    """The host is far ahead: by its own clock, these steps would take nothing."""
    with fake_cuda() as device:
        streams = CudaStreams(torch.device("cuda", 0), lambda error: pytest.fail(str(error)))
        tuner = Asked(3)
        measured = retuning(tuner, streams)
        for step, work in enumerate((5, 2, 40, 1)):
            measured.before_forward(step + 1)
            for _ in range(work):
                device.current().queue()
        streams.close()
    (steps,) = tuner.told
    assert steps.durations_s == pytest.approx([5 * WORK_S, 2 * WORK_S, 40 * WORK_S])
