"""Sessions whose wire is a thread of this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from looped import TIMEOUT_S, Training

from bytesched.testing import Loopback


@pytest.fixture
def loopback() -> Iterator[Loopback]:
    """One rank; `hold()` keeps its chunks on the wire until `release()`."""
    loopback = Loopback(timeout_s=TIMEOUT_S)
    yield loopback
    loopback.close()


@pytest.fixture
def ours(loopback: Loopback) -> Iterator[Training]:
    """Two steps old: its chunks are cut, and nothing is on the wire."""
    ours = Training(loopback)
    ours.train(2)
    ours.flush()
    yield ours
    loopback.release()
    assert ours.session is not None
    ours.session.close()


@pytest.fixture
def plain() -> Training:
    """The same without a session."""
    plain = Training()
    plain.train(2)
    return plain
