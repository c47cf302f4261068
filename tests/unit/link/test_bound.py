"""T*, against a slow reference; the bound of a plan is in spine/test_core_bound.py."""

from __future__ import annotations

import math
import random

import pytest

from bytesched.link.bound import (
    Gradient,
    Layer,
    gradients,
    optimum_s,
    partition_seed_bytes,
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


def test_partition_seed_minimises_the_bound() -> None:
    total_bytes, overhead_s, bytes_per_s, credit_partitions = 40e6, 1e-3, 1e8, 2.0
    seed = partition_seed_bytes(
        total_bytes=total_bytes,
        overhead_s=overhead_s,
        bytes_per_s=bytes_per_s,
        credit_partitions=credit_partitions,
    )

    def bound_s(partition_bytes: float) -> float:
        inversion_s = (credit_partitions + 1) * partition_bytes / bytes_per_s
        return overhead_s * round(total_bytes / partition_bytes) + inversion_s

    assert bound_s(seed) <= min(bound_s(seed * 1.3), bound_s(seed / 1.3))


@pytest.mark.parametrize("bytes_per_s", [0.0, -1.0, math.nan])
def test_a_bandwidth_is_positive(bytes_per_s: float) -> None:
    with pytest.raises(ValueError, match="bandwidth is positive"):
        optimum_s([], 1.0, bytes_per_s)
