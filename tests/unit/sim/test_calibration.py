"""What is predicted stays near what was measured in the lab on 2026-11-20."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bytesched.bench.profile import load_profile
from bytesched.bench.systems import parse_systems
from bytesched.link.bound import gradients, optimum_s
from bytesched.link.fabric import Cores, Fabric
from bytesched.sim.predict import predict
from bytesched.sim.systems import LAB_COSTS, SYSTEMS, Model

#: docs/notes/history.md: hosts, model, T*, DDP, ddp-best, bytesched
MEASURED_MS = (
    (2, "gpt", 436.2, 694.0, 549.1, 453.8),
    (2, "vgg", 356.2, 494.9, 489.5, 373.2),
    (2, "resnet", 351.3, 524.0, 480.9, 371.6),
    (4, "gpt", 656.9, 1050.4, 833.1, 718.7),
    (4, "vgg", 534.5, 746.9, 740.9, 570.8),
    (4, "resnet", 527.8, 789.9, 727.5, 573.1),
)
#: bytesched's sizes are not on record; with those of today, no row misses by more than 4 %
COMPARED = ("ddp:bucket_mb=25", "ddp-best", "bytesched:partition_bytes=524288+credit_bytes=1048576")
#: of the lab's machine: what an all-reduce of 4 KiB takes on so many hosts (`bytesched sim
#: --measure` there), without what its messages wait for cores
START_UP_S = {2: 0.2e-3, 4: 0.5e-3}
#: docs/notes/history.md: 6 ms of backward that are the emulation's own, here
#: those of 100 tensors
TENSOR_S = 6e-3 / 100
CORES = 2


def predicted_ms(system: str, hosts: int, name: str, optimum_ms: float) -> float:
    """What the simulator says, which knows T* alone.

    At as much compute as communication, T* says how fast the links were and how long the model
    computed.
    """
    profile = load_profile(name)
    # At any bandwidth, T* is as many times the communication as it was in this run.
    even = profile.scaled(1 / profile.compute_s)
    bytes_per_s = profile.nbytes * 1e3 * optimum_s(gradients(even.chain()), 1.0, profile.nbytes)
    bytes_per_s /= optimum_ms
    model = Model(
        profile.scaled(profile.nbytes / bytes_per_s / profile.compute_s),
        replace(LAB_COSTS, tensor_s=TENSOR_S, cores=Cores(CORES / hosts)),
    )
    fabric = Fabric(
        ranks=hosts,
        bytes_per_s=bytes_per_s * 2 * (hosts - 1) / hosts,
        latency_s=0.0,
        delay_s=START_UP_S[hosts],
    )
    [one] = parse_systems(system, SYSTEMS)
    return 1e3 * predict(one, model, fabric).iteration_s


@pytest.mark.parametrize("row", MEASURED_MS, ids=lambda row: f"{row[1]}-{row[0]}")
def test_predictions_are_within_five_percent_of_what_was_measured(
    row: tuple[int, str, float, float, float, float],
) -> None:
    hosts, name, optimum_ms, *measured_ms = row
    found_ms = [predicted_ms(system, hosts, name, optimum_ms) for system in COMPARED]
    assert found_ms == pytest.approx(measured_ms, rel=0.05)
