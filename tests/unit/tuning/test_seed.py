"""The fitted link, and the space around what it wants."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tuning_cluster import Cluster

from bytesched.link.sizes import Probe
from bytesched.tunable import Setting
from bytesched.tuning.space import Limits, Link, Range, fit_probes, seed_bytes, seeded_space

KIB = 1024
MIB = 1 << 20


@given(
    overhead_s=st.floats(1e-5, 1e-2),
    bytes_per_s=st.floats(1e6, 1e10),
    seed=st.integers(0, 100),
)
def test_a_line_is_found_among_wild_values(
    overhead_s: float, bytes_per_s: float, seed: int
) -> None:
    link = Link(overhead_s, bytes_per_s)
    sizes = [int(overhead_s * bytes_per_s * ratio) + 16 for ratio in (0.5, 1, 2, 4, 8, 16, 32)]
    seconds = [link.seconds(size) for size in sizes]
    wild = random.Random(seed)
    seconds[wild.randrange(len(sizes))] *= wild.uniform(2, 50)
    found = fit_probes(
        [Probe(size, size / each) for size, each in zip(sizes, seconds, strict=True)]
    )
    assert found.bytes_per_s == pytest.approx(bytes_per_s, rel=0.3)
    assert found.seconds(sizes[3]) == pytest.approx(link.seconds(sizes[3]), rel=0.3)


def test_without_slope_all_time_is_the_bandwidths() -> None:
    assert fit_probes([Probe(MIB, MIB / 0.01)]) == Link(0.0, MIB / 0.01)
    noise = fit_probes([Probe(MIB, MIB / 0.02), Probe(2 * MIB, 2 * MIB / 0.01)])
    assert noise.overhead_s == 0.0
    assert fit_probes([Probe(MIB, 1e8, cpu_s=1e-4)]).overhead_s == pytest.approx(2e-4)


def test_probes_are_points_of_the_line() -> None:
    link = Link(1e-3, 1e8)
    probes = [Probe(size, size / link.seconds(size)) for size in (MIB // 8, MIB, 4 * MIB)]
    found = fit_probes(probes)
    assert found.overhead_s == pytest.approx(1e-3)
    assert found.bytes_per_s == pytest.approx(1e8)


def test_the_seed_is_the_bounds_and_the_box_surrounds_it() -> None:
    cluster = Cluster()
    facts = cluster.facts()
    link = Link(1e-3, 1e8)
    seed = seed_bytes(facts, link)
    assert seed == pytest.approx((1e-3 * 1e8 * facts.model_bytes / 3) ** 0.5, rel=1e-3)
    space = seeded_space(Limits(), facts, link)
    low, high = space.limits.partition
    assert low < facts.untuned.partition_bytes
    assert high > max(seed, facts.untuned.partition_bytes)
    assert high <= 2 * facts.model_bytes
    narrow = seeded_space(Limits(Range(MIB, 2 * MIB)), facts, link)
    assert narrow.limits.partition == Range(MIB, 2 * MIB)


def test_a_tiny_model_has_a_small_space() -> None:
    facts = Cluster().facts(model_bytes=10_000, untuned=Setting(128 * KIB, 256 * KIB))
    space = seeded_space(Limits(), facts, Link(1e-3, 1e8))
    assert space.settings
