"""Links from measured all-reduces."""

from __future__ import annotations

import pytest

from bytesched.environment import rank_view
from bytesched.link.fabric import ALGORITHMS, Fabric
from bytesched.sim.measure import Links, Measured, measured_links


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_the_links_take_what_was_measured(algorithm: str) -> None:
    true = Fabric(ranks=4, bytes_per_s=2e8, latency_s=1e-4, algorithm=algorithm, overlaps=False)
    sizes = tuple(4096 * 4**power for power in range(7))
    seconds = tuple(true.occupied_s(size) for size in sizes)
    links = Links.of(Measured(ranks=4, sizes_bytes=sizes, seconds=seconds), algorithm, "here")
    assert links.bytes_per_s == pytest.approx(2e8, rel=0.01)
    assert links.latency_s == pytest.approx(1e-4, rel=0.3)


@pytest.mark.procs
def test_two_processes_measure_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    links = measured_links(rank_view(), "ring")
    assert links is not None
    assert links.bytes_per_s > 0
    assert links.latency_s > 0
    assert links.origin.startswith("2 ranks")
