"""Sizes by a rule, and probes of a link."""

from __future__ import annotations

import pytest

from bytesched.link.sizes import RULES, Probe, probe_sizes

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
