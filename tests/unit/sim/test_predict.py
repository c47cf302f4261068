"""Predictions on few cores."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from bytesched.bench.profile import LayerProfile, Profile, load_profile
from bytesched.bench.systems import parse_systems
from bytesched.link.cluster import Cluster, Work
from bytesched.link.fabric import Cores, Fabric
from bytesched.sim.predict import Prediction, on_cores, predict
from bytesched.sim.systems import LAB_COSTS, SYSTEMS, Model, buckets, scheduled

FABRIC = Fabric(ranks=4, bytes_per_s=1.2e8, latency_s=1e-4)


def on(cores: float, load: float = 0.0, *, profile: Profile | None = None) -> Model:
    costs = replace(LAB_COSTS, cores=Cores(cores), cpu_load=load)
    return Model(profile or load_profile("gpt"), costs)


def predicted(model: Model) -> list[Prediction]:
    return [predict(one, model, FABRIC) for one in parse_systems(",".join(SYSTEMS), SYSTEMS)]


def test_cores_enough_are_as_good_as_any_number() -> None:
    assert predicted(on(1e6)) == predicted(on(float("inf")))
    assert predicted(on(1e6, 1.0)) == predicted(on(float("inf"), 1.0))
    assert predicted(on(4.0, 1.0)) == predicted(on(float("inf"), 1.0))


def test_half_a_core_costs_bytesched_more_than_ddp() -> None:
    """It sends many more messages."""
    lost = [
        few.iteration_s / enough.iteration_s
        for few, enough in zip(predicted(on(0.5)), predicted(on(2.0)), strict=True)
    ]
    ddp, _, ours = lost
    assert ours > ddp > 1.0


def test_a_model_that_computes_on_the_cores_needs_them_too() -> None:
    beside, alone = predicted(on(1.0, 1.0)), predicted(on(1.0, 0.0))
    for one, other in zip(beside, alone, strict=True):
        assert one.iteration_s > other.iteration_s


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    times_ms = st.floats(0.1, 20.0)
    sizes = st.lists(st.integers(1, 200_000), max_size=3)
    layers = [
        LayerProfile("", draw(times_ms), draw(times_ms), tuple((size,) for size in draw(sizes)))
        for _ in range(draw(st.integers(1, 6)))
    ]
    layers.append(LayerProfile("", 1.0, 1.0, ((100_000,),)))
    return Profile("any", "", tuple(layers))


@settings(deadline=None, max_examples=60)
@given(
    profiles(),
    st.floats(0.1, 4.0),
    st.floats(0.1, 4.0),
    st.sampled_from((0.0, 0.3, 1.0, 2.0)),
    st.sampled_from(("ddp", "bytesched")),
)
def test_with_fewer_cores_no_iteration_is_shorter(
    profile: Profile, one: float, other: float, load: float, system: str
) -> None:
    """In one order: with another one, a slower rank can be lucky."""

    def ended_s(cores: float) -> float:
        model = on(cores, load, profile=profile)
        cpu = model.costs.scheduled if system == "bytesched" else model.costs.plain
        fabric = replace(
            FABRIC,
            message_cpu_s=cpu.message_s,
            byte_cpu_s=cpu.byte_s,
            cores=model.costs.cores.left(load),
        )

        def build(model: Model) -> Work:
            return buckets(model, 0.2) if system == "ddp" else scheduled(model, fabric, {})

        work = build(on_cores(model, build(model), fabric))
        return Cluster(work, fabric).iterate()

    fewer, more = sorted((one, other))
    assert ended_s(fewer) >= ended_s(more) * (1 - 1e-9)
