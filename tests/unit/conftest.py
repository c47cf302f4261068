"""Sessions whose wire is a thread of this process; torch is imported where one is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from loopback import Loopback
    from looped import Training

# Examples take as long as the machine lets them.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


@pytest.fixture
def loopback() -> Iterator[Loopback]:
    """One rank; `hold()` keeps its chunks on the wire until `release()`."""
    from loopback import Loopback
    from looped import TIMEOUT_S

    loopback = Loopback(timeout_s=TIMEOUT_S)
    yield loopback
    loopback.release()
    loopback.close()


@pytest.fixture
def ours(loopback: Loopback) -> Iterator[Training]:
    """Two steps old: its chunks are cut, and nothing is on the wire."""
    from looped import Training

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
    from looped import Training

    plain = Training()
    plain.train(2)
    return plain
