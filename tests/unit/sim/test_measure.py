"""Links and costs from what was measured."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from bytesched.environment import rank_view
from bytesched.link.fabric import Fabric
from bytesched.records import from_json, to_json
from bytesched.sim.measure import Links, Measured, Probes, measured
from bytesched.sim.systems import Costs, CpuCosts

SIZES = tuple(4096 * 4**power for power in range(7))


def found(fabric: Fabric, cores_per_rank: float = 2.0) -> Measured:
    return Measured(
        ranks=fabric.ranks,
        sizes_bytes=SIZES,
        seconds=tuple(fabric.occupied_s(size) + fabric.start_up_s(size) for size in SIZES),
        cores_per_rank=cores_per_rank,
        update_bytes_per_s=1e9,
        copy_bytes_per_s=2e9,
        plain=CpuCosts(message_s=5e-5),
        scheduled=CpuCosts(message_s=1e-4, tensor_s=1e-5, byte_s=1e-9),
    )


@pytest.mark.parametrize("ranks", [2, 4, 9])
def test_the_links_take_what_was_measured(ranks: int) -> None:
    true = Fabric(ranks=ranks, bytes_per_s=2e8, latency_s=1e-4)
    links = Links.of(found(true), "here")
    assert links.bytes_per_s == pytest.approx(2e8, rel=0.01)
    assert links.latency_s == pytest.approx(1e-4, rel=0.3)


def test_waiting_for_cores_is_no_latency_of_the_links() -> None:
    """Four messages' worth of work, 65 us each, on half a core: they wait as long as they work."""
    true = Fabric(ranks=4, bytes_per_s=2e8, latency_s=1e-4)
    alone = Links.of(found(true, 1.0), "here")
    crowded = Links.of(found(true, 0.5), "here")
    assert alone.latency_s - crowded.latency_s == pytest.approx(5e-5 * (6 + 2) / 6)
    silent = Links.of(replace(found(true, 0.01), seconds=(1e-6, *found(true).seconds[1:])), "here")
    assert silent.latency_s == 0.0


def test_a_last_probe_that_was_disturbed_still_gives_a_rate() -> None:
    true = found(Fabric(ranks=2, bytes_per_s=2e8, latency_s=1e-4))
    odd = replace(true, seconds=(*true.seconds[:-1], true.seconds[-2]))
    assert Links.of(odd, "here").bytes_per_s > 0


def test_costs_take_what_was_measured_and_keep_the_rest() -> None:
    facts = found(Fabric(ranks=2, bytes_per_s=2e8, latency_s=1e-4), 0.5)
    costs = from_json(Measured, to_json(facts)).costs(Costs(update_bytes_per_s=1.0, cpu_load=0.5))
    assert costs.cpu_load == 0.5
    assert costs.cores.per_rank == 0.5
    assert costs.scheduled == facts.scheduled
    assert costs.update_bytes_per_s == 1e9


@pytest.mark.procs
@pytest.mark.slow
def test_two_processes_measure_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    from warm_python import warm_python

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "executable", warm_python())
    both = measured(rank_view(), Probes(sizes_bytes=SIZES[:3], cost_bytes=1 << 20, cost_s=1.0))
    assert both is not None
    facts, origin = both
    links = Links.of(facts, origin)
    assert links.bytes_per_s > 0
    assert links.latency_s >= 0
    assert links.origin.startswith("2 ranks")
    assert facts.cores_per_rank > 0
    assert facts.scheduled.byte_s >= 0
    assert facts.update_bytes_per_s > 0
