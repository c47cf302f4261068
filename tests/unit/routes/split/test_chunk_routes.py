"""The hops of chunks, of all ranks beside each other: what one sends, another receives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn

from bytesched.plugins.layout.plan import Ownership, Plan
from bytesched.plugins.layout.slots import Slot
from bytesched.plugins.routes.split.chunk_routes import (
    FROM_OWNER,
    TO_MEASURER,
    TO_OWNER,
    ChunkRoutes,
    Lanes,
    Message,
    message_tag,
)
from bytesched.task import CommTask

SIZES = [2, 3, 5, 8, 2, 4]


def plan_of(ranks: int) -> Plan:
    """Tensors that ranks own in turn, each a chunk."""
    slots = [Slot(f"p{n}", nn.Parameter(torch.zeros(size))) for n, size in enumerate(SIZES)]
    plan = Plan(slots, partition_bytes=1 << 20)
    plan.cut(1 << 20, Ownership(ranks, owners=[n % ranks for n in range(len(SIZES))]))
    return plan


def lanes_of(rank: int, ranks: int) -> Lanes:
    """Lane 0 for sums, and three to each other rank."""
    peers = [peer for peer in range(ranks) if peer != rank]
    leave, share, spread = ({peer: 1 + 3 * peer + kind for peer in peers} for kind in range(3))
    return Lanes(0, leave, share, spread)


def laid(
    ranks: int,
    is_spread: Callable[[CommTask], bool] = lambda _: True,
    measurers: dict[int, int] | None = None,
) -> list[tuple[Plan, ChunkRoutes]]:
    """Of every rank."""
    found = []
    for rank in range(ranks):
        plan = plan_of(ranks)
        routes = ChunkRoutes(plan, rank, is_spread, measurers or {})
        routes.lay(lanes_of(rank, ranks), lambda _: None)
        found.append((plan, routes))
    return found


def sent(routes: ChunkRoutes, plan: Plan, rank: int, *, tells: bool) -> Counter[tuple[int, int]]:
    """Of a rank: to whom, and under which tag."""
    messages = Counter(
        (plan.owners[chunk.index], message_tag(chunk, TO_OWNER)) for chunk in routes.foreign
    )
    for chunk in routes.owned:
        for hop in chunk.followers:
            assert isinstance(hop, Message)
            messages[hop.peer, hop.tag] += 1
    if tells:
        messages.update((hop.peer, hop.tag) for hop in routes.telling.values())
    assert all(peer != rank for peer, _ in messages)
    return messages


@pytest.mark.parametrize("tells", [False, True])
@pytest.mark.parametrize("spreads", ["all", "none", "even"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_what_a_rank_sends_another_one_receives_once(ranks: int, spreads: str, tells: bool) -> None:
    def is_spread(chunk: CommTask) -> bool:
        return spreads == "all" or (spreads == "even" and chunk.index % 2 == 0)

    owners = plan_of(ranks).owners
    measurers = {
        index: (owner + 1) % ranks
        for index, owner in enumerate(owners)
        if spreads == "none" or (spreads == "even" and index % 2)
    }
    found = laid(ranks, is_spread, measurers)
    received: Counter[tuple[int, int]] = Counter()
    leaving: Counter[tuple[int, int]] = Counter()
    for rank, (plan, routes) in enumerate(found):
        leaving.update(sent(routes, plan, rank, tells=tells))
        # An owner receives the gradients of each other rank, to sum them.
        for chunk in routes.owned:
            received[rank, message_tag(chunk, TO_OWNER)] += ranks - 1
        received.update(
            (rank, message_tag(chunk, kind)) for chunk, kind in routes.receives(tells=tells)
        )
    assert leaving == received


@pytest.mark.parametrize("tells", [False, True])
def test_hops_are_counted_as_they_are_sent_and_received(tells: bool) -> None:
    for _, routes in laid(3, lambda chunk: chunk.index % 2 == 0, {1: 0, 3: 2, 5: 1}):
        hops = routes.hops(tells=tells)
        for chunk in routes.owned:
            telling = tells and chunk.index in routes.telling
            assert hops[chunk.index] == 1 + len(chunk.followers) + telling
        comes = Counter(chunk.index for chunk, _ in routes.receives(tells=tells))
        for chunk in routes.foreign:
            assert hops[chunk.index] == 1 + comes[chunk.index]
        assert routes.sums(tells=tells) == len(routes.owned) + tells * len(routes.told)


def test_hops_of_different_chunks_and_ranks_have_different_numbers() -> None:
    for plan, routes in laid(4):
        hops = [hop.index for chunk in routes.owned for hop in chunk.followers]
        numbers = [*hops, *(chunk.index for chunk in plan.chunks)]
        assert len(set(numbers)) == len(numbers)


def test_a_rank_is_told_of_what_it_measures_and_another_one_owns() -> None:
    found = laid(3, lambda _: False, {0: 1, 1: 2})
    for rank, (plan, routes) in enumerate(found):
        assert routes.has_measurers
        first, second, own_of_two = plan.chunks[:3]
        assert routes.is_told([first]) is (rank in (0, 1))
        assert routes.is_told([second]) is (rank in (1, 2))
        assert routes.is_told([own_of_two]) is (rank == 2)
        assert [chunk.index for chunk in routes.told] == {0: [], 1: [0], 2: [1]}[rank]
        kinds = {kind for _, kind in routes.receives(tells=True)}
        assert kinds == (set() if rank == 0 else {TO_MEASURER})
        assert not routes.receives(tells=False)


def test_an_order_holds_for_what_is_owned_and_what_leaves() -> None:
    ((plan, routes), *_) = laid(2)
    assert [chunk.index for chunk in routes.order] == [
        chunk.index for chunk in sorted(plan.chunks, key=plan.computed)
    ]
    routes.use_order(plan.chunks)
    assert [chunk.index for chunk in routes.owned] == [
        n for n in range(len(plan.chunks)) if plan.owners[n] == 0
    ]
    assert routes.leaving(1) == [n for n in range(len(plan.chunks)) if plan.owners[n] == 1]
    assert [kind for _, kind in routes.receives(tells=True)] == [FROM_OWNER] * len(routes.foreign)


def test_routes_say_what_they_are() -> None:
    ((_, routes), *_) = laid(2, lambda _: False, {0: 1})
    assert repr(routes) == "<ChunkRoutes rank 0: 3 owned, 3 leave, 1 to tell, 0 told>"
