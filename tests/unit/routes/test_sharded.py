"""The second phase of a sharded update, between two ranks of this process."""

from __future__ import annotations

import threading

import torch
from connected import two_connected
from torch import nn

from bytesched.errors import PeerLost
from bytesched.observe import Observers
from bytesched.plugins.layout.packing import Packer
from bytesched.plugins.layout.plan import Ownership, Plan
from bytesched.plugins.layout.slots import Slot
from bytesched.plugins.routes.split.exchange import Exchange
from bytesched.plugins.routes.split.sharded import ParameterSpread
from bytesched.tunable import Setting

_LIMIT_S = 60.0


def test_what_is_expected_of_a_rank_that_is_gone_fails_with_its_name() -> None:
    """In the script's thread, which is about to step, before any other has heard of it."""
    here, gone = two_connected()
    slots = [Slot(name, nn.Parameter(torch.zeros(3))) for name in ("own", "other's")]
    plan = Plan(slots, partition_bytes=4)
    plan.cut(1 << 20, Ownership(2, owners=[0, 1]))
    failed: list[BaseException] = []
    has_failed = threading.Event()

    def fail(error: BaseException) -> None:
        failed.append(error)
        has_failed.set()

    exchange = Exchange(
        here,
        plan,
        Packer(plan, 2, "none"),
        Setting(1 << 20, 2 << 20),
        is_spread=lambda _: False,
        reduced=lambda _: None,
        summed=lambda: None,
        failed=fail,
        observers=Observers(),
    )
    parameters = ParameterSpread(exchange, plan, spread=lambda _: None, gathered=lambda _: None)
    gone.abort()
    while here.broken([1]) is None:
        pass
    parameters.expect(slots[1].chunks)
    assert has_failed.wait(_LIMIT_S)
    (error,) = failed
    assert isinstance(error, PeerLost)
    assert error.peers == (1,)
    parameters.close()
    exchange.close(is_idle=parameters.is_idle)
    here.close()
