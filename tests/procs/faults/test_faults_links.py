"""A rank is killed in the middle of a message, of which Gloo tells the other one nothing."""

from __future__ import annotations

import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import run_fresh

from bytesched.errors import PeerLost
from bytesched.plugins.routes.opening import open_group

#: takes far longer on loopback than it is given
HALF_SENT_FLOATS = 1 << 26


def is_killed_while_it_receives() -> None:
    """Rank 1 is killed with a message half received; the other says what it saw."""
    assert dist.group.WORLD is not None
    group = open_group(dist.group.WORLD, "gloo", name="s/data", timeout_s=300.0)
    value = torch.ones(HALF_SENT_FLOATS)
    dist.barrier()
    # One message, and nothing else that Gloo would tell of the end.
    work = group.backend.broadcast([value])
    if group.rank:
        with pytest.raises(RuntimeError):
            work.wait(timedelta(milliseconds=20))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        group.wait(work, task="half")
    except PeerLost as error:
        print(error)
    finally:
        group.close()


def test_a_rank_that_dies_in_the_middle_of_a_message_is_missed() -> None:
    survivor, _ = run_fresh(is_killed_while_it_receives, timeout_s=45.0)
    assert "rank 1 is gone" in survivor.stdout, survivor.stderr
    assert survivor.code == 0, survivor.stderr
