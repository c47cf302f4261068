"""Sessions whose wire is a thread of this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from looped import TIMEOUT_S

from bytesched.testing import Loopback


@pytest.fixture
def loopback() -> Iterator[Loopback]:
    """One rank; `hold()` keeps its chunks on the wire until `release()`."""
    loopback = Loopback(timeout_s=TIMEOUT_S)
    yield loopback
    loopback.release()
    loopback.close()
