"""Predictions for layers of experts: lanes, pieces, and the bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytesched.bench.profile import LayerProfile, Profile, load_profile
from bytesched.bench.systems import EXCHANGE_SYSTEMS, parse_systems
from bytesched.link.fabric import Fabric
from bytesched.sim.exchanges import predict_exchanging
from bytesched.sim.predict import Prediction
from bytesched.sim.systems import Costs, Model

FABRIC = Fabric(ranks=2, bytes_per_s=1.2e8, latency_s=1e-4)
COSTS = Costs(update_bytes_per_s=1e12)

experts = st.builds(
    lambda forward, nbytes: LayerProfile("experts", forward, 2 * forward, (), 0, nbytes),
    st.floats(0.1, 20),
    st.integers(1, 4_000_000),
)
dense = st.builds(
    lambda forward, size: LayerProfile("dense", forward, 2 * forward, ((size,),)),
    st.floats(0.1, 20),
    st.integers(1, 2_000_000),
)


def predicted(profile: Profile, systems: str, fabric: Fabric = FABRIC) -> dict[str, Prediction]:
    model = Model(profile, COSTS)
    return {one.label: predict_exchanging(one, model, fabric) for one in parse_systems(systems)}


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_order_and_pieces_shorten_the_iteration(ranks: int) -> None:
    fabric = replace(FABRIC, ranks=ranks)
    profile = load_profile("moe")
    profile = profile.scaled(profile.nbytes / fabric.gradient_bytes_per_s / profile.compute_s)
    found = predicted(profile, ",".join(EXCHANGE_SYSTEMS), fabric)
    ours, pieces, idle = (found[name] for name in ("bytesched", "bytesched-pieces", "idle"))
    assert idle.exchange_p50_s == pytest.approx(idle.exchange_p95_s)
    assert idle.exchange_p95_s < ours.exchange_p95_s
    assert pieces.iteration_s < ours.iteration_s < found["ddp"].iteration_s
    assert ours.to_optimum < 1.15


def test_all_to_alls_share_the_link_with_gradients_urgent_or_not() -> None:
    layers = (
        LayerProfile("dense", 1.0, 1.0, ((25_000_000,),)),
        LayerProfile("experts", 1.0, 1.0, (), 0, 24_000_000),
        LayerProfile("last", 1.0, 1.0, ((25_000_000,),)),
    )
    found = predicted(
        Profile("", "", layers), "idle,bytesched,bytesched-no-lane", replace(FABRIC, latency_s=0.0)
    )
    assert found["idle"].exchange_p95_s == pytest.approx(0.1)
    # Two chunks of gradients are under way beside it.
    assert found["bytesched"].exchange_p95_s == pytest.approx(0.3, rel=0.05)
    assert replace(found["bytesched"], system="bytesched-no-lane") == found["bytesched-no-lane"]


def test_a_queue_is_waited_for() -> None:
    """Behind gradients of the same group, an all-to-all waits for all of them."""
    layers = (
        LayerProfile("dense", 1.0, 1.0, ((1000,),)),
        LayerProfile("experts", 1.0, 1.0, (), 0, 2_400_000),
        *[LayerProfile("last", 1.0, 1.0, ((2_500_000,),))] * 4,
    )
    systems = "ddp:bucket_mb=1,ddp-own-group:bucket_mb=1"
    queued, own = predicted(Profile("", "", layers), systems).values()
    # Four gradients of 10 MB, at 120 MB/s, of which two share the link at a time.
    assert queued.exchange_p95_s > 0.3
    assert own.exchange_p95_s < 0.05


@given(st.lists(st.one_of(dense, dense, experts), min_size=1, max_size=6), st.sampled_from([2, 4]))
@settings(max_examples=60, deadline=None)
def test_nothing_beats_the_bound(layers: list[LayerProfile], ranks: int) -> None:
    head = LayerProfile("head", 1.0, 2.0, ((1000,),))
    profile = Profile("drawn", "", (head, *layers))
    found = predicted(profile, ",".join(EXCHANGE_SYSTEMS[:-1]), replace(FABRIC, ranks=ranks))
    for one in found.values():
        assert one.iteration_s >= one.optimum_s * (1 - 1e-9), one


def test_the_command_shows_all_to_alls(said: Callable[..., str]) -> None:
    text = said("sim --profile moe --ranks 2 --rate 1gbit")
    assert "p95 ms" in text
    assert "yes, bytesched-pieces takes" in text
    assert all(name in text for name in EXCHANGE_SYSTEMS)


def test_pieces_do_not_change_what_is_sent() -> None:
    layers = (LayerProfile("experts", 8.0, 8.0, (), 0, 2_400_000),)
    profile = Profile("", "", (LayerProfile("dense", 0.0, 0.0, ((1,),)), *layers))
    [whole] = predicted(profile, "bytesched").values()
    [pieces] = predicted(profile, "bytesched-pieces").values()
    # 8 ms of experts between 2 x 10 ms; of four pieces, dispatches and returns of 2.5 ms each are
    # sent one after the other, and each waits for 2 ms of experts: 20 ms, but for the last return.
    assert whole.iteration_s == pytest.approx(0.056, rel=0.02)
    assert pieces.iteration_s == pytest.approx(0.040, rel=0.05)
