"""T* and the bound of a real schedule, against a slow reference and a simulated link."""

from __future__ import annotations

import heapq
import math
import random

import pytest

from bytesched.link.bound import (
    Gradient,
    Layer,
    gradients,
    optimum_s,
    partition_seed_bytes,
    schedule_bound_s,
)


def chain(rng: random.Random, length: int) -> list[Layer]:
    layers = []
    for _ in range(length):
        backward_s = rng.uniform(0.05, 1.5)
        layers.append(Layer(backward_s / 2, backward_s, rng.choice([0.05, 0.3, 1, 4, 8])))
    return layers


def compute_s(layers: list[Layer]) -> float:
    return sum(layer.forward_s + layer.backward_s for layer in layers)


def forward_end_s(layers: list[Layer], arrived_s: list[float]) -> float:
    now_s = sum(layer.backward_s for layer in layers)
    for layer, end_s in zip(layers, arrived_s, strict=True):
        now_s = max(now_s, end_s) + layer.forward_s
    return now_s


def tiny_slices(layers: list[Layer], bytes_per_s: float, slice_s: float) -> float:
    """First layer first, in slices of time so small that preemption is nearly perfect."""
    work = gradients(layers)
    left_s = [gradient.nbytes / bytes_per_s for gradient in work]
    arrived_s = [0.0] * len(work)
    now_s = 0.0
    while any(left > 0 for left in left_s):
        ready = [
            index
            for index, gradient in enumerate(work)
            if left_s[index] > 0 and gradient.release_s <= now_s
        ]
        now_s += slice_s
        if ready:
            left_s[ready[0]] -= slice_s
            arrived_s[ready[0]] = now_s
    return forward_end_s(layers, arrived_s)


def windowed(
    layers: list[Layer], bytes_per_s: float, partition: float, credit: float, overhead_s: float
) -> tuple[float, int]:
    """Partitions by priority within a credit window over a first-in first-out link."""
    work = gradients(layers)
    chunks = [
        (gradient.release_s, index, min(partition, gradient.nbytes - at * partition))
        for index, gradient in enumerate(work)
        for at in range(math.ceil(gradient.nbytes / partition))
    ]
    arrivals = sorted(chunks)
    ready: list[tuple[int, int, float]] = []
    link: list[tuple[int, float]] = []
    arrived_s = [0.0] * len(layers)
    now_s, link_free_s, available, taken, done = 0.0, math.inf, credit, 0, 0
    while done < len(chunks):
        while taken < len(arrivals) and arrivals[taken][0] <= now_s:
            _, index, nbytes = arrivals[taken]
            heapq.heappush(ready, (index, taken, nbytes))
            taken += 1
        while ready and available > 0:
            index, _, nbytes = heapq.heappop(ready)
            available -= nbytes
            link.append((index, nbytes))
        if link and link_free_s == math.inf:
            link_free_s = now_s + overhead_s + link[0][1] / bytes_per_s
        next_arrival_s = arrivals[taken][0] if taken < len(arrivals) else math.inf
        now_s = min(link_free_s, next_arrival_s)
        if now_s == link_free_s:
            index, nbytes = link.pop(0)
            available = min(available + nbytes, credit)
            arrived_s[index] = now_s
            link_free_s = math.inf
            done += 1
    return forward_end_s(layers, arrived_s), len(chunks)


def test_gradients_of_a_chain() -> None:
    first, last = gradients([Layer(1, 2, 10), Layer(3, 4, 20)])
    assert first == Gradient(release_s=6, tail_s=4, nbytes=10)
    assert last == Gradient(release_s=4, tail_s=3, nbytes=20)


def test_optimum_by_hand() -> None:
    layers = [Layer(1, 1, 2), Layer(1, 1, 6)]
    # On a fast link only the sending of the first layer, released last, is left over.
    assert optimum_s(gradients(layers), 4, bytes_per_s=1e9) == pytest.approx(4 + 2e-9)
    # The second layer sends 1 of 6 until the first is released at 2, which sends until 4; the
    # second ends at 9 and computes until 10.
    assert optimum_s(gradients(layers), 4, bytes_per_s=1) == 10


def test_optimum_of_nothing_to_send_is_the_computation() -> None:
    assert optimum_s([], 1.5, bytes_per_s=1) == 1.5
    assert optimum_s(gradients([Layer(1, 2, 0)]), 3, bytes_per_s=1) == 3


def test_optimum_equals_a_preemptive_schedule_in_tiny_slices() -> None:
    rng = random.Random(1)
    for _ in range(20):
        layers = chain(rng, rng.randint(1, 6))
        best_s = optimum_s(gradients(layers), compute_s(layers), bytes_per_s=1.0)
        sliced_s = tiny_slices(layers, 1.0, 0.002)
        assert best_s - 1e-9 <= sliced_s <= best_s + 0.002 * (2 * len(layers) + 2)


def test_no_windowed_schedule_beats_the_optimum_or_exceeds_the_bound() -> None:
    rng = random.Random(2)
    tightest = 0.0
    for _ in range(500):
        layers = chain(rng, rng.randint(2, 12))
        partition = rng.choice([0.1, 0.25, 0.5, 1, 2])
        credit = partition * rng.choice([0.5, 1, 2, 4])
        overhead_s = rng.choice([0, 0.01, 0.05])
        best_s = optimum_s(gradients(layers), compute_s(layers), bytes_per_s=1.0)
        finish_s, chunks = windowed(layers, 1.0, partition, credit, overhead_s)
        limit_s = schedule_bound_s(
            best_s,
            chunks=chunks,
            overhead_s=overhead_s,
            partition_bytes=partition,
            credit_bytes=credit,
            bytes_per_s=1.0,
        )
        assert best_s - 1e-9 <= finish_s <= limit_s + 1e-9
        tightest = max(tightest, (finish_s - best_s) / (limit_s - best_s))
    assert tightest > 0.8


def test_partition_seed_minimises_the_bound() -> None:
    total_bytes, overhead_s, bytes_per_s, credit_partitions = 40e6, 1e-3, 1e8, 2.0
    seed = partition_seed_bytes(
        total_bytes=total_bytes,
        overhead_s=overhead_s,
        bytes_per_s=bytes_per_s,
        credit_partitions=credit_partitions,
    )

    def bound_s(partition_bytes: float) -> float:
        return schedule_bound_s(
            0.0,
            chunks=round(total_bytes / partition_bytes),
            overhead_s=overhead_s,
            partition_bytes=partition_bytes,
            credit_bytes=credit_partitions * partition_bytes,
            bytes_per_s=bytes_per_s,
        )

    assert bound_s(seed) <= min(bound_s(seed * 1.3), bound_s(seed / 1.3))


@pytest.mark.parametrize("bytes_per_s", [0.0, -1.0, math.nan])
def test_a_bandwidth_is_positive(bytes_per_s: float) -> None:
    with pytest.raises(ValueError, match="bandwidth is positive"):
        optimum_s([], 1.0, bytes_per_s)
