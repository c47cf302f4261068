"""The hops of chunks, of all ranks beside each other: what one sends, another receives."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from bytesched.plugins.layout.plan import Ownership, Plan
from bytesched.plugins.layout.slots import Slot
from bytesched.plugins.routes.split.chunk_routes import (
    FROM_OWNER,
    TO_OWNER,
    ChunkRoutes,
    Lanes,
    Message,
    message_tag,
)

SIZES = [2, 3, 5, 8, 2, 4]


def plan_of(ranks: int, updated: str) -> Plan:
    """Tensors, each a chunk, that ranks own in turn: "all" of them, "none", or the "even" ones."""
    slots = [Slot(f"p{n}", nn.Parameter(torch.zeros(size))) for n, size in enumerate(SIZES)]
    plan = Plan(slots, partition_bytes=1)
    owners = [
        n % ranks if updated == "all" or (updated == "even" and n % 2 == 0) else None
        for n in range(len(SIZES))
    ]
    plan.cut(1 << 20 if updated == "all" else 1, Ownership(ranks, owners))
    return plan


def lanes_of(rank: int, ranks: int) -> Lanes:
    """Lane 0 for sums, and two to each other rank."""
    peers = [peer for peer in range(ranks) if peer != rank]
    leave, share = ({peer: 1 + 2 * peer + kind for peer in peers} for kind in range(2))
    return Lanes(0, leave, share)


def laid(ranks: int, updated: str = "none") -> list[tuple[Plan, ChunkRoutes]]:
    """Of every rank."""
    found = []
    for rank in range(ranks):
        plan = plan_of(ranks, updated)
        routes = ChunkRoutes(plan, rank)
        routes.lay(lanes_of(rank, ranks), lambda _: None)
        found.append((plan, routes))
    return found


def sent(routes: ChunkRoutes, plan: Plan, rank: int) -> Counter[tuple[int, int]]:
    """Of a rank: to whom, and under which tag."""
    messages = Counter(
        (plan.owners[chunk.index], message_tag(chunk, TO_OWNER)) for chunk in routes.foreign
    )
    for chunk in routes.owned:
        for hop in chunk.followers:
            assert isinstance(hop, Message)
            messages[hop.peer, hop.tag] += 1
    assert all(peer != rank for peer, _ in messages)
    return messages


@pytest.mark.parametrize("updated", ["all", "none", "even"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_what_a_rank_sends_another_one_receives_once(ranks: int, updated: str) -> None:
    received: Counter[tuple[int, int]] = Counter()
    leaving: Counter[tuple[int, int]] = Counter()
    for rank, (plan, routes) in enumerate(laid(ranks, updated)):
        leaving.update(sent(routes, plan, rank))
        # An owner receives the gradients of each other rank, to sum them.
        for chunk in routes.owned:
            received[rank, message_tag(chunk, TO_OWNER)] += ranks - 1
        received.update((rank, message_tag(chunk, FROM_OWNER)) for chunk in routes.receives())
    assert leaving == received


@pytest.mark.parametrize("updated", ["all", "none", "even"])
def test_hops_are_counted_as_they_are_sent_and_received(updated: str) -> None:
    for _, routes in laid(3, updated):
        for chunk in routes.owned:
            assert routes.hops[chunk.index] == 1 + len(chunk.followers)
        comes = Counter(chunk.index for chunk in routes.receives())
        for chunk in routes.foreign:
            assert routes.hops[chunk.index] == 1 + comes[chunk.index]


def test_hops_of_different_chunks_and_ranks_have_different_numbers() -> None:
    for plan, routes in laid(4):
        hops = [hop.index for chunk in routes.owned for hop in chunk.followers]
        numbers = [*hops, *(chunk.index for chunk in plan.chunks)]
        assert len(set(numbers)) == len(numbers)


def test_an_order_holds_for_what_is_owned_and_what_leaves() -> None:
    ((plan, routes), *_) = laid(2, "all")
    assert [chunk.index for chunk in routes.order] == [
        chunk.index for chunk in sorted(plan.chunks, key=plan.computed)
    ]
    routes.use_order(plan.chunks)
    assert [chunk.index for chunk in routes.owned] == [
        n for n in range(len(plan.chunks)) if plan.owners[n] == 0
    ]
    assert routes.leaving(1) == [n for n in range(len(plan.chunks)) if plan.owners[n] == 1]
    assert not routes.receives()
