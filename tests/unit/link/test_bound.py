"""T*, also where an iteration needs a norm of all gradients, against slow references.

The bound of a plan is in spine/test_core_bound.py.
"""

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
    sharded_optimum_s,
    split_optimum_s,
)


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


SEEDS = range(25)


def chain(seed: int) -> tuple[list[Layer], float]:
    rng = random.Random(seed)
    layers = [
        Layer(backward_s / 2, backward_s, rng.choice([0.05, 0.3, 1, 4, 8]))
        for backward_s in (rng.uniform(0.05, 1.5) for _ in range(rng.randint(1, 9)))
    ]
    return layers, rng.uniform(0.3, 4.0)


def compute_s(layers: list[Layer]) -> float:
    return sum(layer.forward_s + layer.backward_s for layer in layers)


def all_sent_s(work: list[Gradient], bytes_per_s: float) -> float:
    """When a link that is never idle without need has sent every gradient."""
    now_s = 0.0
    for gradient in sorted(work, key=lambda one: one.release_s):
        now_s = max(now_s, gradient.release_s) + gradient.nbytes / bytes_per_s
    return now_s


def tiny_slices(
    layers: list[Layer], bytes_per_s: float, slice_s: float, waits: str = "for nothing"
) -> float:
    """First halves before second ones, front layers first, in slices of time.

    Second ones wait for the end of backward, of it and all first ones, or for nothing.
    """
    backward_s = sum(layer.backward_s for layer in layers)
    work = gradients(layers)
    left_s = [[one.nbytes / 2 / bytes_per_s for one in work] for _ in range(2)]
    ends_s = [[0.0] * len(work) for _ in range(2)]
    now_s = 0.0
    while any(left > 0 for half in left_s for left in half):
        ready = [
            (half, index)
            for half in range(2)
            for index, one in enumerate(work)
            if left_s[half][index] > 0
            and one.release_s <= now_s
            and (half == 0 or left_s[0][index] <= 0)
            and (half == 0 or waits == "for nothing" or now_s >= backward_s)
            and (half == 0 or waits != "for all" or max(left_s[0]) <= 0)
        ]
        now_s += slice_s
        if ready:
            # Without a norm, a second half in front is as urgent as a first one.
            half, index = min(ready, key=lambda one: one[1]) if waits == "for step" else ready[0]
            left_s[half][index] -= slice_s
            ends_s[half][index] = now_s
    forward_s = backward_s if waits == "for step" else max(backward_s, *ends_s[0])
    for layer, end_s in zip(layers, ends_s[1], strict=True):
        forward_s = max(forward_s, end_s) + layer.forward_s
    return forward_s


@pytest.mark.parametrize("seed", SEEDS)
def test_split_is_what_tiny_slices_come_to(seed: int) -> None:
    layers, bytes_per_s = chain(seed)
    best_s = split_optimum_s(gradients(layers), compute_s(layers), bytes_per_s)
    found_s = tiny_slices(layers, bytes_per_s, 1e-3)
    assert best_s <= found_s + 1e-9
    assert found_s <= best_s + 1e-3 * (3 * len(layers) + 2)


@pytest.mark.parametrize("is_clipped", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.one_in(5)
def test_sharded_is_what_tiny_slices_come_to(seed: int, is_clipped: bool) -> None:
    layers, bytes_per_s = chain(seed)
    work, total_s = gradients(layers), compute_s(layers)
    best_s = sharded_optimum_s(work, total_s, bytes_per_s, is_clipped=is_clipped)
    waits = "for all" if is_clipped else "for step"
    found_s = tiny_slices(layers, bytes_per_s, 1e-3, waits)
    assert best_s <= found_s + 1e-9
    assert found_s <= best_s + 1e-3 * (3 * len(layers) + 2)
    whole_s = split_optimum_s(work, total_s, bytes_per_s) if is_clipped else 0.0
    assert best_s >= max(whole_s, optimum_s(work, total_s, bytes_per_s)) - 1e-9


@pytest.mark.parametrize("seed", SEEDS)
def test_split_lies_between_what_is_not_clipped_and_whole_all_reduces(seed: int) -> None:
    layers, bytes_per_s = chain(seed)
    work, total_s = gradients(layers), compute_s(layers)
    unclipped_s = optimum_s(work, total_s, bytes_per_s)
    split_s = split_optimum_s(work, total_s, bytes_per_s)
    backward_s = sum(layer.backward_s for layer in layers)
    clipped_s = max(backward_s, all_sent_s(work, bytes_per_s)) + total_s - backward_s
    assert unclipped_s <= split_s + 1e-9
    assert split_s <= clipped_s + 1e-9


def test_no_gradient_is_no_communication() -> None:
    assert sharded_optimum_s([], 2.0, 1.0, is_clipped=True) == 2.0
    assert split_optimum_s([], 2.0, 1.0) == 2.0
