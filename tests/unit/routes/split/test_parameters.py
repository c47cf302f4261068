"""The second phase of a sharded update, between two ranks of this process."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from connected import two_connected
from together import together
from torch import nn

from bytesched.errors import PeerLost
from bytesched.observe import Observers
from bytesched.plugins.layout.packing import Packer
from bytesched.plugins.layout.plan import Ownership, Plan
from bytesched.plugins.layout.slots import Slot
from bytesched.plugins.routes.groups.group import Group
from bytesched.plugins.routes.split.exchange import Exchange
from bytesched.plugins.routes.split.parameters import ParameterSpread
from bytesched.plugins.routes.split.turns import Sent
from bytesched.task import CommTask
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
        reduced=lambda _: None,
        summed=lambda: None,
        failed=fail,
        observers=Observers(),
    )
    parameters = ParameterSpread(exchange, plan, spread=lambda _: None, gathered=lambda _: None)
    gone.abort()
    while here.broken([1]) is None:
        pass
    parameters.expect(slots[1].chunks, Sent.PARAMETERS)
    assert has_failed.wait(_LIMIT_S)
    (error,) = failed
    assert isinstance(error, PeerLost)
    assert error.peers == (1,)
    parameters.close()
    exchange.close(is_idle=parameters.is_idle)
    here.close()


class _Rank:
    """One rank: a parameter that it owns, another's, and what sends them."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.slots = [Slot(f"p{n}", nn.Parameter(torch.zeros(8))) for n in range(2)]
        self.plan = Plan(self.slots, partition_bytes=4)
        self.plan.cut(16, Ownership(2, owners=[0, 1]))
        self.errors: list[BaseException] = []
        self.summed = threading.Semaphore(0)
        self.gathered = threading.Semaphore(0)
        self.exchange = Exchange(
            group,
            self.plan,
            Packer(self.plan, 2, "none"),
            Setting(16, 16),
            reduced=lambda _: self.summed.release(),
            summed=lambda: None,
            failed=self.errors.append,
            observers=Observers(),
        )
        self.parameters = ParameterSpread(
            self.exchange,
            self.plan,
            spread=lambda _: None,
            gathered=lambda _: self.gathered.release(),
        )

    def submit(self) -> None:
        """A round begins, whose gradients are all there."""
        for slot in self.slots:
            slot.parameter.grad = torch.ones(8)
            assert slot.take_gradient()
        self.exchange.begin_round()
        self.parameters.begin_round()
        for chunk in self.plan.chunks:
            while not chunk.notify_ready():
                pass
            self.exchange.submit(chunk)

    def wait(self, what: threading.Semaphore, chunks: Sequence[CommTask]) -> None:
        for _ in chunks:
            assert what.acquire(timeout=_LIMIT_S), (self.exchange.story(), self.errors)

    def step(self, turn: int) -> None:
        """What the other rank owns is to come."""
        other = 1 - self.group.rank
        self.parameters.arm(turn, [], {})
        self.parameters.expect(self.slots[other].chunks, Sent.PARAMETERS)

    def spread(self, turn: int) -> None:
        for chunk in self.slots[self.group.rank].chunks:
            self.parameters.stage(chunk, turn)
            self.parameters.spread(chunk, turn)

    def close(self) -> None:
        self.parameters.close()
        self.exchange.close(is_idle=self.parameters.is_idle)
        self.group.close()


def test_parameters_do_not_wait_for_gradients_of_the_next_round() -> None:
    """A rank that has none of them yet cannot begin that round, and receives no gradients."""
    early, late = ranks = [_Rank(group) for group in two_connected()]
    together(lambda rank: ranks[rank].submit())
    for rank in ranks:
        rank.wait(rank.summed, rank.plan.chunks)
        rank.step(1)
    late.spread(1)
    early.wait(early.gathered, early.slots[1].chunks)
    early.submit()
    early.spread(1)
    late.wait(late.gathered, late.slots[0].chunks)
    late.submit()
    for rank in ranks:
        rank.wait(rank.summed, rank.plan.chunks)
    together(lambda rank: ranks[rank].close())
