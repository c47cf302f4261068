"""What a session says when its warm-up is over."""

from __future__ import annotations

import pytest
from looped import SMALL, Training

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
