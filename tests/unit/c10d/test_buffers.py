"""The broadcast of buffers, on a group that may break."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from connected import two_connected

from bytesched.errors import PeerLost, TransportError
from bytesched.plugins.c10d.buffers import BufferBroadcast
from bytesched.plugins.failures import Failures


def test_what_this_rank_has_broken_itself_raises_why() -> None:
    """A thread of ours has heard that another rank is gone: no deadline has passed."""
    here, other = two_connected()
    failures = Failures(here)
    lost = PeerLost("rank 1 is gone", peers=[1])
    failures.fail(lost)
    ddp: Any = None
    with pytest.raises(TransportError) as raised:
        BufferBroadcast(here, failures.raise_first)(ddp, {"buffer": torch.ones(2)})
    assert raised.value is lost
    assert failures.is_error_seen
    other.abort()
    for group in (here, other):
        group.close()
