"""Orders that are planned from measured times, and what they cost at gates."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytesched.ahead import ChunkTimes, Link, exposed_s, gate_times, plan_order, waited_s

MIB = 2**20
#: a byte a second
SLOW = Link(seconds_per_byte=1.0, seconds_per_chunk=0.0)

chunk_lists = st.lists(
    # Few values, so that many are equal.
    st.builds(ChunkTimes, st.integers(1, 6), st.integers(0, 9).map(float), st.integers(0, 5)),
    max_size=12,
)
links = st.builds(
    Link, st.sampled_from([0.0, 0.1, 0.7, 1.0]), st.sampled_from([0.0, 0.3]), st.integers(1, 3)
)


def by_readiness(chunks: Sequence[ChunkTimes]) -> list[int]:
    return sorted(range(len(chunks)), key=lambda index: (chunks[index].ready_s, index))


def greedy(chunks: Sequence[ChunkTimes], link: Link) -> list[int]:
    """Each time that the link is free, the most urgent of what is ready: without a core."""
    now_s, left = 0.0, set(range(len(chunks)))
    order: list[int] = []
    while left:
        now_s = max(now_s, min(chunks[index].ready_s for index in left))
        ready = [index for index in left if chunks[index].ready_s <= now_s]
        # Of equals, the one that became ready first, as the core has it.
        chosen = min(ready, key=lambda i: (chunks[i].gate, chunks[i].ready_s, i))
        now_s = now_s + link.seconds_per_chunk + link.seconds_per_byte * chunks[chosen].nbytes
        left.remove(chosen)
        order.append(chosen)
    return order


def training(seed: int, layers: int, slices: int) -> tuple[list[ChunkTimes], Link, list[float]]:
    """Slices in the order of backward, a link that takes 0.5 to 2 times as long as backward does,
    and how long each layer takes forward."""
    chance = random.Random(seed)
    backward_s = [chance.uniform(0.5, 1.5) for _ in range(layers)]
    chunks: list[ChunkTimes] = []
    now_s = 0.0
    for gate in reversed(range(layers)):
        now_s += backward_s[gate]
        for _ in range(chance.randint(1, slices)):
            chunks.append(ChunkTimes(chance.randint(MIB // 4, MIB), now_s, gate))
    seconds_per_byte = chance.uniform(0.5, 2) * now_s / sum(chunk.nbytes for chunk in chunks)
    link = Link(seconds_per_byte, 0.05 * seconds_per_byte * MIB)
    return chunks, link, [one_s / 2 for one_s in backward_s]


# -- plans -----------------------------------------------------------------------------


@given(chunk_lists, links, st.integers(1, 30))
def test_fifo_is_the_order_of_readiness(
    chunks: list[ChunkTimes], link: Link, credit_bytes: int
) -> None:
    plan = plan_order(chunks, link, policy="fifo", credit_bytes=credit_bytes)
    assert plan == by_readiness(chunks)


@given(chunk_lists, st.sampled_from([0.1, 0.7, 1.0]), st.sampled_from([0.0, 0.3]))
def test_with_the_least_credit_a_plan_is_what_a_greedy_link_sends(
    chunks: list[ChunkTimes], seconds_per_byte: float, seconds_per_chunk: float
) -> None:
    link = Link(seconds_per_byte, seconds_per_chunk)
    assert plan_order(chunks, link) == greedy(chunks, link)


def test_credit_says_how_far_ahead_of_the_link_it_is_decided() -> None:
    chunks = [ChunkTimes(2, float(at), 9 - at) for at in range(5)]
    plans = {credit: plan_order(chunks, SLOW, credit_bytes=credit) for credit in (1, 3, 5, 100)}
    # At 2, when chunk 0 is across, 1 is already behind it, and with a larger credit 2 or all are.
    assert plans == {
        1: [0, 2, 4, 3, 1],
        3: [0, 1, 2, 4, 3],
        5: [0, 1, 2, 3, 4],
        100: [0, 1, 2, 3, 4],
    }


@pytest.mark.parametrize(
    ("ready_s", "plan"),
    [
        pytest.param(30.0, [2, 1, 0, 3], id="what is across before anything else comes goes"),
        pytest.param(28.0, [2, 1, 3, 0], id="what is not waits for what is more urgent"),
    ],
)
def test_prophet(ready_s: float, plan: list[int]) -> None:
    chunks = [*(ChunkTimes(10, 0.0, 3 - at) for at in range(3)), ChunkTimes(5, ready_s, 0)]
    link = Link(seconds_per_byte=1.0, seconds_per_chunk=5.0, concurrent=2)
    # One at a time, 2 and 1 take until 30.
    assert plan_order(chunks, link, credit_bytes=10) == [2, 1, 3, 0]
    assert plan_order(chunks, link, policy="prophet", credit_bytes=10) == plan


@settings(max_examples=50)
@given(chunk_lists, st.sampled_from([0.1, 0.7, 1.0]), st.integers(1, 12))
def test_prophet_changes_nothing_where_a_link_has_no_constant(
    chunks: list[ChunkTimes], seconds_per_byte: float, credit_bytes: int
) -> None:
    """A block ends before what would have gone in front of it is ready."""
    link = Link(seconds_per_byte, 0.0)
    plan = plan_order(chunks, link, policy="prophet", credit_bytes=credit_bytes)
    assert plan == plan_order(chunks, link, credit_bytes=credit_bytes)


# -- replays ---------------------------------------------------------------------------


def test_gates_wait_for_what_they_need() -> None:
    chunks = [ChunkTimes(4, 0.0, 1), ChunkTimes(2, 3.0, 0)]
    assert gate_times([0, 1], chunks, SLOW, [1.0, 1.0, 1.0]) == [6.0, 7.0, 8.0]
    assert exposed_s([0, 1], chunks, SLOW, [1.0, 1.0, 1.0]) == 3.0
    # Chunk 0 is held back until 3.
    assert gate_times([1, 0], chunks, SLOW, [1.0, 1.0, 1.0]) == [5.0, 9.0, 10.0]
    assert gate_times([], [], SLOW, [2.0, 1.0]) == [0.0, 2.0]
    assert exposed_s([], [], SLOW, []) == 0.0


def test_operations_under_way_share_the_rate_and_not_their_constants() -> None:
    chunks = [ChunkTimes(2, 0.0, 0), ChunkTimes(2, 0.0, 1), ChunkTimes(2, 0.0, 2)]
    link = Link(seconds_per_byte=1.0, seconds_per_chunk=1.0)
    assert gate_times([0, 1, 2], chunks, link, [0.0] * 3) == [3.0, 6.0, 9.0]
    # 0 and 1 are across at 5; the third one begins then.
    two = replace(link, concurrent=2)
    assert gate_times([0, 1, 2], chunks, two, [0.0] * 3) == [5.0, 5.0, 8.0]
    assert gate_times([0, 1, 2], chunks, replace(link, concurrent=3), [0.0] * 3) == [7.0] * 3
    # 1 starts at 2, when one byte of 0 is left, and shares the rate from 3 on.
    apart = [ChunkTimes(3, 0.0, 0), ChunkTimes(2, 2.0, 1)]
    assert gate_times([0, 1], apart, two, [0.0] * 2) == [5.0, 6.0]


@given(chunk_lists, links)
def test_a_link_is_never_idle_while_something_is_issued(
    chunks: list[ChunkTimes], link: Link
) -> None:
    """By readiness, the last one lands no later than all would one after the other."""
    last_s = gate_times(by_readiness(chunks), chunks, link, [0.0] * 6)[-1]
    at_s = 0.0
    for chunk in sorted(chunks, key=lambda chunk: chunk.ready_s):
        at_s = max(at_s, chunk.ready_s) + link.alone_s(chunk.nbytes)
    assert last_s <= max([at_s, *(chunk.ready_s for chunk in chunks)]) + 1e-9
    if link.concurrent == 1:
        assert last_s == pytest.approx(at_s)


def test_what_plans_are_compared_by_is_exact_where_chunks_go_one_by_one() -> None:
    """Forward takes half as long as backward here, and each layer has a gate."""
    for seed in range(50):
        chunks, link, gates = training(seed, 8, 3)
        order = random.Random(seed).sample(range(len(chunks)), len(chunks))
        for one in (order, by_readiness(chunks), plan_order(chunks, link)):
            waited = exposed_s(one, chunks, link, gates)
            assert waited_s(one, chunks, link) == pytest.approx(waited, abs=1e-9)


def test_what_does_not_fit_together_is_refused() -> None:
    chunks = [ChunkTimes(1, 0.0, 1)] * 2
    with pytest.raises(ValueError, match="no order of 2 chunks"):
        gate_times([0, 0], chunks, SLOW, [1.0, 1.0])
    with pytest.raises(ValueError, match="there are 1 gates"):
        exposed_s([0, 1], chunks, SLOW, [1.0])
    with pytest.raises(ValueError, match="no such link"):
        Link(1.0, 0.0, concurrent=0)


# -- what plans are worth ----------------------------------------------------------------


@settings(max_examples=75)
@given(
    chunk_lists,
    st.sampled_from([0.1, 0.7, 1.0]),
    st.sampled_from([0.0, 0.3]),
    st.integers(1, 30),
    st.lists(st.floats(0.0, 5.0), min_size=6, max_size=6),
)
def test_one_at_a_time_no_gate_is_later_than_by_readiness(
    chunks: list[ChunkTimes],
    seconds_per_byte: float,
    seconds_per_chunk: float,
    credit_bytes: int,
    gates: list[float],
) -> None:
    """What is less urgent goes first only if it was ready first, and then it does by readiness,
    with all else that was ready."""
    link = Link(seconds_per_byte, seconds_per_chunk)
    plan = plan_order(chunks, link, credit_bytes=credit_bytes)
    planned_s = gate_times(plan, chunks, link, gates)
    ready_s = gate_times(by_readiness(chunks), chunks, link, gates)
    assert all(one <= other + 1e-9 for one, other in zip(planned_s, ready_s, strict=True))


def test_two_at_a_time_a_plan_is_better_on_the_whole() -> None:
    """Of single ones, a few are worse: a chunk that is held back hides no constant meanwhile."""
    planned_s, ready_s, worse = 0.0, 0.0, 0
    for seed in range(200):
        chunks, link, gates = training(seed, 10, 2)
        link = replace(link, concurrent=2)
        planned = exposed_s(plan_order(chunks, link), chunks, link, gates)
        ready = exposed_s(by_readiness(chunks), chunks, link, gates)
        planned_s, ready_s, worse = planned_s + planned, ready_s + ready, worse + (planned > ready)
    assert planned_s < 0.7 * ready_s
    assert worse < 15
