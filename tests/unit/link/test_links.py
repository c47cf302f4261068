"""Links in a formula: cores of a rank, algorithms of a library, hosts, and sizes of chunks."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytesched.link.fabric import ALGORITHMS, GLOO_RANKS, LIBRARIES, Cores, Fabric
from bytesched.link.levels import ring_share, shares_hosts, two_level_share
from bytesched.link.sizes import RULES, Probe, probe_sizes

CORES = st.floats(0.05, 64.0)
LOADS = st.floats(0.0, 16.0)


@pytest.mark.parametrize(
    ("cores", "others", "expected"),
    [
        (2.0, 0.0, 2.0),
        (2.0, 0.5, 1.5),
        # Two that want a whole core each share one, and half of one, in equal parts.
        (1.0, 1.0, 0.5),
        (0.5, 1.0, 0.25),
        (0.5, 0.1, 0.4),
        # One thread beside seven.
        (4.0, 7.0, 0.5),
        (math.inf, 100.0, math.inf),
    ],
)
def test_what_the_others_leave_or_a_fair_share(
    cores: float, others: float, expected: float
) -> None:
    assert Cores(cores).left(others) == pytest.approx(expected)


def test_work_is_stretched_by_what_it_lacks() -> None:
    assert Cores(0.5).stretch(1.0) == 2.0
    assert Cores(0.5).stretch(0.25) == 1.0
    assert Cores(1.0).stretch(1.0, 1.0) == 2.0
    assert Cores().stretch(1.0, 5.0) == 1.0


@given(CORES, CORES, LOADS, LOADS)
def test_with_fewer_cores_nothing_is_faster(
    one: float, other: float, wanted: float, others: float
) -> None:
    fewer, more = sorted((one, other))
    assert Cores(fewer).left(others) <= Cores(more).left(others)
    assert Cores(fewer).stretch(wanted, others) >= Cores(more).stretch(wanted, others) >= 1.0


@given(CORES, LOADS)
def test_no_more_is_handed_out_than_there_is(cores: float, others: float) -> None:
    assert 0 < Cores(cores).left(others) <= cores


@pytest.mark.parametrize("cores", [0.0, -1.0, math.nan])
def test_no_rank_is_without_a_core(cores: float) -> None:
    with pytest.raises(ValueError, match="a part of one"):
        Cores(cores)


def test_a_collective_waits_for_cores() -> None:
    """Ring of two: 2 messages and 2 more, 1 ms each, on half a core: 4 ms longer, half hidden."""
    links = {"ranks": 2, "bytes_per_s": 1e8, "latency_s": 1e-3, "message_cpu_s": 1e-3}
    enough, half = Fabric(**links), Fabric(**links, cores=0.5)  # type: ignore[arg-type]
    assert enough.occupied_s(10**6) == 10e-3
    assert half.occupied_s(10**6) == pytest.approx(12e-3)
    assert half.start_up_s(10**6) - enough.start_up_s(10**6) == pytest.approx(4e-3)
    # What the cores need for all bytes is the least that it takes: 4 + 10 ms on half a core.
    busy = Fabric(**links, byte_cpu_s=10e-9, cores=0.5)  # type: ignore[arg-type]
    assert busy.occupied_s(10**6) == pytest.approx(28e-3)
    assert busy.cpu_s(10**6) == pytest.approx(14e-3)


LATENCY_S = 30e-6


def taken(library: str, ranks: int, nbytes: float) -> str:
    return LIBRARIES[library](ranks, nbytes, 1.25e9, LATENCY_S)


@pytest.mark.parametrize(
    ("library", "ranks", "nbytes", "expected"),
    [
        ("gloo", 2, 4, "ring"),
        ("gloo", 1024, 4, "ring"),
        ("mpi", 2, 2048, "doubling"),
        ("mpi", 1024, 2048, "doubling"),
        ("mpi", 1024, 2049, "halving"),
        ("nccl", 4, 1 << 30, "ring"),
        ("nccl", 1024, 4096, "tree"),
        ("nccl", 1024, 1 << 36, "ring"),
        ("auto", GLOO_RANKS, 4, "ring"),
        ("auto", GLOO_RANKS + 1, 4, "doubling"),
        ("auto", 1024, 1 << 20, "halving"),
    ],
)
def test_what_a_library_takes(library: str, ranks: int, nbytes: int, expected: str) -> None:
    assert taken(library, ranks, nbytes) == expected


@pytest.mark.parametrize(("library", "steps"), [("auto", 10), ("mpi", 10), ("nccl", 20)])
def test_small_messages_of_a_thousand_ranks_take_few_steps(library: str, steps: int) -> None:
    fabric = Fabric(ranks=1024, bytes_per_s=1.25e9, latency_s=LATENCY_S, algorithm=library)
    assert fabric.start_up_s(1024) == pytest.approx(steps * LATENCY_S)
    assert fabric.start_up_s(1 << 20) <= 20 * LATENCY_S * (1 + 1e-12)


@given(st.integers(2, 4096))
def test_no_all_reduce_sends_less_than_it_must(ranks: int) -> None:
    """2(n-1)/n bytes for each, and log2 n messages, or two if all talk to all."""
    for name, algorithm in ALGORITHMS.items():
        assert algorithm.bytes_per_byte(ranks) >= 2 * (ranks - 1) / ranks
        assert algorithm.messages(ranks) >= (2 if name == "exchange" else (ranks - 1).bit_length())


@pytest.mark.parametrize(
    ("names", "shared"), [("aa", False), ("ab", False), ("aab", True), ("aabb", True)]
)
def test_hosts_that_are_shared(names: str, shared: bool) -> None:
    assert shares_hosts(names) is shared


@pytest.mark.parametrize("hosts", [2, 4, 8])
def test_what_a_ring_sends_more(hosts: int) -> None:
    ranks = 8 * hosts
    names = [str(rank // 8) for rank in range(ranks)]
    more = ring_share(names) / two_level_share(hosts)
    assert more == pytest.approx((ranks - 1) / (8 * (hosts - 1)))


def test_a_ring_that_changes_hosts_at_every_rank() -> None:
    assert ring_share("abab") == pytest.approx(2 * 1.5)
    assert ring_share("aaaa") == 0


MIB = 2**20


def test_probing_ends_where_larger_is_not_faster() -> None:
    """Two chunks in flight hide each other's overhead, 1 ms at 1 Gbit/s."""
    probes = probe_sizes(lambda n: Probe(n, n / max(n / 118e6, (1e-3 + n / 118e6) / 2)))
    assert probes[-1].nbytes <= MIB


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
    [("mxnet", (MIB // 4, MIB)), ("store calls", (MIB, 2 * MIB)), ("stages", (MIB, 2 * MIB))],
)
def test_sizes_where_nothing_is_measured(name: str, sizes: tuple[int, int]) -> None:
    assert RULES[name].sizes() == sizes


@pytest.mark.parametrize("model_mib", [0, 1, 5, 40, 4096])
def test_probes_under_way_take_no_more_memory_than_the_model(model_mib: int) -> None:
    """A link that larger sums always fill better is probed up to 32 MiB at most."""
    probes = probe_sizes(lambda nbytes: Probe(nbytes, float(nbytes)), model_mib * MIB)
    largest_bytes = max(512 * 1024, min(32 * MIB, model_mib * MIB // 2))
    assert largest_bytes / 2 < probes[-1].nbytes <= largest_bytes
