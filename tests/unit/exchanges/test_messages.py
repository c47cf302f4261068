"""Exchanges as tasks: what goes first, what it carries, and whom an error reaches."""

from __future__ import annotations

import pytest
import torch
from fake_gloo import CLOSED, FakeGloo, fake_group
from torch import Tensor

from bytesched.errors import PeerLost, SchedulerClosed
from bytesched.plugins.exchanges.messages import Exchanges, _tag
from bytesched.urgency import URGENCY


def parts(rank: int, sizes: list[int]) -> list[Tensor]:
    return [torch.full((size, 2), float(10 * rank + to)) for to, size in enumerate(sizes)]


def room(sizes: list[int]) -> list[Tensor]:
    return [torch.empty(size, 2) for size in sizes]


def test_receives_are_posted_before_sends() -> None:
    gloo = FakeGloo(rank=1, size=3)
    exchanges = Exchanges(fake_group(gloo))
    exchanges.begin("x", parts(1, [1, 1, 1]), room([1, 1, 1]), None)
    assert [(kind, peer) for kind, _, peer, _ in gloo.begun] == [
        ("recv", 0),
        ("recv", 2),
        ("send", 2),
        ("send", 0),
    ]
    for work in gloo.works():
        work.end()
    exchanges.close()


def test_messages_of_other_sizes_have_other_tags() -> None:
    """Gloo ends a process that gets more than it has room for."""
    tags = {_tag(index, nbytes) for index in (0, 1, 1023) for nbytes in (0, 1, 40, 1 << 30)}
    assert len(tags) == 12
    assert max(tags) < 1 << 31
    # Of a message that is never sent.
    assert all(_tag(0, nbytes) != 1 << 20 for nbytes in range(2000))


def test_one_that_ends_ends_its_section() -> None:
    gloo = FakeGloo()
    exchanges = Exchanges(fake_group(gloo))
    before = len(URGENCY._sections)
    tasks = [
        exchanges.begin(f"x{n}", parts(0, [0, 1]), room([0, 1]), URGENCY.begin("x"))
        for n in range(2)
    ]
    assert len(URGENCY._sections) == before + 2
    for work in gloo.works():
        work.end()
    for task in tasks:
        task()
    assert len(URGENCY._sections) == before
    exchanges.close()


def test_an_error_ends_every_exchange_and_refuses_the_next() -> None:
    gloo = FakeGloo()
    exchanges = Exchanges(fake_group(gloo))
    section = URGENCY.begin("x")
    before = len(URGENCY._sections)
    tasks = [
        exchanges.begin("first", parts(0, [0, 1]), room([0, 1]), section),
        exchanges.begin("second", parts(0, [0, 1]), room([0, 1]), None),
    ]
    gloo.gone.add(1)
    gloo.works()[0].end(CLOSED)
    for task in tasks:
        with pytest.raises(PeerLost, match="rank 1 is gone"):
            task()
    assert len(URGENCY._sections) == before - 1
    with pytest.raises(PeerLost):
        exchanges.begin("third", parts(0, [0, 1]), room([0, 1]), None)
    exchanges.close()


def test_what_is_under_way_when_exchanges_close_ends_whatever_comes_later() -> None:
    """A layer that failed may close before the thread that waits for messages hears of it."""
    gloo = FakeGloo()
    exchanges = Exchanges(fake_group(gloo))
    before = len(URGENCY._sections)
    task = exchanges.begin("x", parts(0, [0, 1]), room([0, 1]), URGENCY.begin("x"))
    exchanges.close()
    assert len(URGENCY._sections) == before
    with pytest.raises(SchedulerClosed):
        task()
    with pytest.raises(SchedulerClosed):
        exchanges.begin("late", parts(0, [0, 1]), room([0, 1]), URGENCY.begin("late"))
    assert len(URGENCY._sections) == before
    for work in gloo.works():
        work.end(CLOSED)
