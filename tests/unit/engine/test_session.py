"""What a session says when its warm-up is over."""

from __future__ import annotations

import pytest
import torch
from looped import SMALL, Training, inputs
from torch import Tensor

from bytesched.errors import PeerLost, UnusedParameterError
from bytesched.testing import Loopback


@pytest.mark.parametrize(
    ("partition_bytes", "chunks"),
    [(1 << 20, "1 chunk of up to 1 MiB"), (SMALL["partition_bytes"], "9 chunks of up to 0.25 KiB")],
)
def test_line_at_the_start(
    loopback: Loopback, caplog: pytest.LogCaptureFixture, partition_bytes: int, chunks: str
) -> None:
    training = Training(loopback, partition_bytes=partition_bytes, credit_bytes=1 << 20)
    with caplog.at_level("INFO", logger="bytesched"):
        training.train(2)
    training.flush()
    assert training.session is not None
    training.session.close()
    (line,) = (line for line in caplog.messages if "under way" in line)
    assert line == (
        f"1 ranks, 6 tensors, 1.891 KiB in {chunks}, 1 MiB under way at a time, "
        "policy priority, mode cross"
    )


def test_an_error_that_the_script_has_seen_is_not_raised_at_the_end(ours: Training) -> None:
    for parameter in ours.model[0].parameters():
        parameter.requires_grad_(False)
    ours.model(inputs(2)).sum().backward()
    with pytest.raises(UnusedParameterError):
        ours.optimizer.step()
    assert ours.session is not None
    assert isinstance(ours.session.error, UnusedParameterError)
    assert ours.session.unseen_error is None


def test_nor_is_one_that_came_of_it(ours: Training) -> None:
    """A peer is gone: what is on the wire fails in our thread, a broadcast in the script's."""
    session = ours.session
    assert session is not None
    session._progress.fail(PeerLost("rank 1 is gone", peers=[1]))
    assert session.unseen_error is session.error
    session.fail(PeerLost("rank 1 is gone, says another group", peers=[1]))
    assert session.unseen_error is None


def test_gradients_that_a_script_refers_to_stay_the_same_tensors(ours: Training) -> None:
    ours.backward()
    gradients = [parameter.grad for parameter in ours.model.parameters()]
    values = [gradient.clone() for gradient in gradients]
    assert ours.session is not None
    ours.session.close()
    for parameter, gradient, value in zip(ours.model.parameters(), gradients, values, strict=True):
        assert parameter.grad is gradient
        assert type(gradient) is Tensor
        assert torch.equal(gradient, value)
