"""The sentence: yes, hardly or no."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bytesched.bench.profile import load_profile
from bytesched.link.fabric import Cores, Fabric
from bytesched.link.host import call_s
from bytesched.sim.predict import Prediction
from bytesched.sim.systems import Costs, Model
from bytesched.sim.table import Case, gain, verdict

CASE = Case(
    Model(load_profile("gpt"), Costs(update_bytes_per_s=1e9)),
    Fabric(ranks=2, bytes_per_s=1.2e8, latency_s=1e-4),
    (),
)


def found(system: str, ms: float, *, optimum_ms: float = 80.0) -> Prediction:
    return Prediction(
        system=system,
        ranks=2,
        iteration_s=ms / 1e3,
        optimum_s=optimum_ms / 1e3,
        collectives=10,
        chosen="",
    )


@pytest.mark.parametrize(
    ("ddp_ms", "ours_ms", "sentence"),
    [
        (110, 100, "yes, bytesched takes 100.0 ms and is 1.10 times as fast as ddp (1"),
        (103.1, 100, "yes, bytesched takes 100.0 ms and is 1.03 times as fast as ddp"),
        (102, 100, "hardly, bytesched takes 100.0 ms and is 1.02 times as fast as ddp"),
        (101, 100, "hardly, bytesched takes 100.0 ms and is 1.01 times as fast as ddp"),
        (100, 100, "no gain here, bytesched takes 100.0 ms, as long as ddp (100.0 ms)"),
        (100, 110, "no gain here, bytesched takes 110.0 ms, 1.10 times as long as ddp (100.0 ms)"),
        (80.1, 80.1, "no gain here, ddp takes 80.1 ms, within 0.1 % of what any schedule can"),
    ],
)
def test_thresholds(ddp_ms: float, ours_ms: float, sentence: str) -> None:
    both = [found("ddp", ddp_ms), found("bytesched", ours_ms)]
    assert verdict(CASE, both).startswith(f"2 ranks: {sentence}")
    assert gain(both) == pytest.approx(ddp_ms / ours_ms)


def test_what_is_lost_has_a_cause() -> None:
    both = [found("ddp", 120.0), found("bytesched", 100.0)]
    assert "; it stays 25 % above T*, as each of its 10 collectives among 2 ranks" in verdict(
        CASE, both
    )
    costs = replace(CASE.model.costs, cores=Cores(0.5))
    crowded = replace(CASE, model=replace(CASE.model, costs=costs))
    assert "as each of its 10 collectives waits for cores, of which a rank has 0.5." in verdict(
        crowded, both
    )


def test_a_gpu_that_waits_for_its_host_gains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 tensors and 10 collectives are 2,600 calls."""
    monkeypatch.setattr("bytesched.link.host.call_s", lambda: 1e-6)
    gpu = replace(CASE, fabric=replace(CASE.fabric, algorithm="nccl", overlaps=False))
    small = [found("ddp", 82.5), found("bytesched", 80.0)]
    assert verdict(gpu, small) == (
        "2 ranks: no gain here if the GPU waits for its host: for 100 tensors in 10 chunks, "
        "bytesched's Python takes 2.6 ms of each iteration, and at most 2.5 ms can be gained."
    )
    assert verdict(CASE, small).startswith("2 ranks: yes, ")
    assert verdict(gpu, [found("ddp", 82.7), small[1]]).startswith("2 ranks: yes, ")


def test_what_a_call_takes_is_measured() -> None:
    assert 1e-9 < call_s() < 1e-4


def test_without_a_peer_there_is_no_verdict() -> None:
    said = verdict(CASE, [found("bytesched", 100.0)])
    assert said == "2 ranks: no verdict, as no system to compare with was predicted (ddp-best)."
    assert gain([found("bytesched", 100.0)]) == 1.0
    assert verdict(CASE, [found("ddp", 120.0)]) == ""
