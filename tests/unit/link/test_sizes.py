"""Sizes from a link: what is given stays, what is missing follows the link and the load."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytesched.link.sizes import RULES, Probe, chosen_sizes, probe_sizes

MIB = 2**20


def link(bytes_per_s: float, overhead_s: float, cpu_s: float = 3e-4) -> list[Probe]:
    """Probes of a link on which two chunks in flight hide each other's overhead."""

    def measure(nbytes: int) -> Probe:
        each_s = max(nbytes / bytes_per_s, (overhead_s + nbytes / bytes_per_s) / 2)
        return Probe(nbytes, nbytes / each_s, cpu_s)

    return probe_sizes(measure)


def test_the_smallest_partition_that_fills_the_link() -> None:
    """At 1 Gbit with 1 ms of overhead, 128 KiB are full already; more would only delay."""
    partition_bytes, credit_bytes = chosen_sizes(
        link(118e6, 1e-3), model_bytes=40 * MIB, cpu_load=0.0
    )
    assert 128 * 1024 <= partition_bytes <= 256 * 1024
    assert credit_bytes == 2 * partition_bytes


def test_a_fast_link_needs_larger_partitions() -> None:
    slow, fast = (
        chosen_sizes(link(rate, 1e-3), model_bytes=40 * MIB, cpu_load=0.0)[0]
        for rate in (118e6, 1180e6)
    )
    assert fast >= 4 * slow


def test_a_model_on_the_same_cores_needs_larger_partitions() -> None:
    """Small chunks made a model that computes on the CPU slower than plain DDP."""
    idle, busy = (
        chosen_sizes(link(118e6, 1e-3), model_bytes=40 * MIB, cpu_load=load)[0]
        for load in (0.05, 0.2)
    )
    assert idle < 512 * 1024 <= busy
    # All of it counts by now, and no more than that if many cores compute.
    some, many = (
        chosen_sizes(link(118e6, 1e-3), model_bytes=40 * MIB, cpu_load=load)[0] for load in (0.3, 8)
    )
    assert busy < some == many


def test_a_link_that_only_huge_partitions_fill_does_not_cut_a_model_in_two() -> None:
    """As between processes of one machine: three of 32 MB would be all of it."""
    probes = [Probe(nbytes << 17, 1e9 * 1.1 ** nbytes.bit_length()) for nbytes in (1, 16, 256)]
    partition_bytes, _ = chosen_sizes(probes, model_bytes=40 * MIB, cpu_load=0.0)
    assert partition_bytes == 2 * MIB


def test_a_small_model_is_not_cut_where_each_chunk_takes_longer_than_its_bytes() -> None:
    """As over NCCL: 60 µs to launch a sum, 100 GB/s once it runs. A 32nd would be 300 kB."""
    probes = probe_sizes(lambda nbytes: Probe(nbytes, nbytes / (60e-6 + nbytes / 100e9)))
    partition_bytes, _ = chosen_sizes(probes, model_bytes=9_500_000, cpu_load=0.0)
    assert partition_bytes >= 2 * MIB


def test_probing_ends_where_larger_is_not_faster() -> None:
    assert link(118e6, 1e-3)[-1].nbytes <= MIB


@given(
    given_partition=st.sampled_from([0, 4096, MIB]),
    given_credit=st.sampled_from([0, 8192, 2 * MIB]),
    rate=st.floats(1e5, 1e11),
    overhead_s=st.floats(1e-6, 1e-1),
    cpu_load=st.floats(0, 16),
    model_bytes=st.integers(1, 2**36),
)
def test_what_is_given_stays_and_the_rest_is_usable(
    given_partition: int,
    given_credit: int,
    rate: float,
    overhead_s: float,
    cpu_load: float,
    model_bytes: int,
) -> None:
    partition_bytes, credit_bytes = chosen_sizes(
        link(rate, overhead_s),
        model_bytes=model_bytes,
        cpu_load=cpu_load,
        partition_bytes=given_partition,
        credit_bytes=given_credit,
    )
    assert given_partition in (0, partition_bytes)
    assert given_credit in (0, credit_bytes)
    assert 1 <= partition_bytes <= 32 * MIB
    if not (given_partition and given_credit):
        assert partition_bytes <= credit_bytes


@pytest.mark.parametrize("count", [1, 3])
def test_one_probe_is_enough(count: int) -> None:
    probes = [Probe(MIB, 1e8)] * count
    partition_bytes = int(1.5 * MIB)
    idle = chosen_sizes(probes, model_bytes=64 * MIB, cpu_load=0.0)
    busy = chosen_sizes(probes, model_bytes=64 * MIB, cpu_load=1.0)
    assert idle == (partition_bytes, 2 * partition_bytes)
    assert busy == (partition_bytes, 4 * partition_bytes)
    # Half of the time is all that a model gets where ranks share cores; less is not always.
    partition_bytes, credit_bytes = chosen_sizes(probes, model_bytes=64 * MIB, cpu_load=0.4)
    assert credit_bytes == 2 * partition_bytes


@pytest.mark.parametrize("name", RULES)
def test_every_rule_keeps_what_is_given_and_its_limits(name: str) -> None:
    rule = RULES[name]
    assert rule.sizes(4096, 8192, best_bytes=1e9) == (4096, 8192)
    assert rule.sizes(4096) == (4096, rule.window * 4096)
    assert rule.sizes(4096, window=7) == (4096, 7 * 4096)
    for best_bytes in (0.0, 3e5, 1e12):
        partition_bytes, _ = rule.sizes(best_bytes=best_bytes)
        assert rule.smallest_bytes <= partition_bytes <= rule.largest_bytes
        assert partition_bytes % rule.step_bytes == 0
    assert (rule.sizes(0, 900)[0] <= 900) == rule.within_credit


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("mxnet", (MIB // 4, MIB)),
        ("store calls", (MIB, 2 * MIB)),
        ("stages", (MIB, 2 * MIB)),
    ],
)
def test_sizes_where_nothing_is_measured(name: str, sizes: tuple[int, int]) -> None:
    assert RULES[name].sizes() == sizes


@pytest.mark.parametrize("model_mib", [0, 1, 5, 40, 4096])
def test_probes_under_way_take_no_more_memory_than_the_model(model_mib: int) -> None:
    """A link that larger sums always fill better is probed up to 32 MiB at most."""
    probes = probe_sizes(lambda nbytes: Probe(nbytes, float(nbytes)), model_mib * MIB)
    largest_bytes = max(512 * 1024, min(32 * MIB, model_mib * MIB // 2))
    assert largest_bytes / 2 < probes[-1].nbytes <= largest_bytes
