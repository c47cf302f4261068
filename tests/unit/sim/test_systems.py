"""Systems as work: buckets and chunks hold every gradient once; and what few cores cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bytesched.bench.profile import LayerProfile, Profile, load_profile
from bytesched.bench.systems import parse_systems
from bytesched.link.fabric import Cores, Fabric
from bytesched.sim.predict import Prediction, bound_s, predict
from bytesched.sim.systems import LAB_COSTS, SYSTEMS, Costs, Model, buckets, scheduled
from bytesched.sim.table import Case

FABRIC = Fabric(ranks=4, bytes_per_s=1.2e8, latency_s=1e-4)


def model(name: str = "gpt", *, clip: bool = False) -> Model:
    return Model(load_profile(name), Costs(update_bytes_per_s=1e9), clip=clip)


def of_mib(*sizes: int) -> Model:
    """A model with layers of these sizes."""
    layers = (LayerProfile(str(n), 1.0, 2.0, ((mib << 18,),)) for n, mib in enumerate(sizes))
    return Model(Profile("", "", tuple(layers)), Costs(update_bytes_per_s=1e9))


@pytest.mark.parametrize("name", ["gpt", "vgg", "resnet"])
@pytest.mark.parametrize("clip", [False, True])
def test_every_system_sends_every_gradient_once(name: str, clip: bool) -> None:
    one = model(name, clip=clip)
    for work in (buckets(one, 1), buckets(one), scheduled(one, FABRIC, {})):
        assert sum(job.nbytes for job in work.jobs) == one.profile.nbytes
        waited_for = {index for bundle in work.bundles for index in bundle.jobs}
        assert waited_for >= set(range(len(work.jobs)))


def test_buckets_are_closed_by_the_gradient_that_fills_them() -> None:
    """As torch does it, from the last layer on: 3 + 3 MiB reach 4, then 3 + 1 do, 1 is left."""
    one = of_mib(1, 1, 3, 3, 3)
    found = [(job.nbytes >> 20, job.layer) for job in buckets(one, 4).jobs]
    assert found == [(6, 3), (4, 1), (1, 0)]
    as_it_comes = [(job.nbytes >> 20, job.layer) for job in buckets(one).jobs]
    assert as_it_comes == [(3, 4), (8, 0)]


def test_gradients_are_copied_into_buckets_that_are_no_views_and_out_of_them() -> None:
    costs = Costs(update_bytes_per_s=1e9, copy_bytes_per_s=1e10)
    one = Model(load_profile("vgg"), costs)
    copied, views = buckets(one, 4), buckets(one, 4, are_views=True)
    copy_s = one.profile.nbytes / 1e10
    assert sum(copied.backward_s) - sum(views.backward_s) == pytest.approx(copy_s)
    [whole], [alone] = copied.bundles, views.bundles
    assert whole.update_s - alone.update_s == pytest.approx(copy_s)
    assert copied.jobs == views.jobs


def test_buckets_are_cut_into_chunks_alike_and_ready_together() -> None:
    """As the engine does it, from the last layer on: 3, 3 MiB, and 3 + 1 MiB in halves."""
    one = of_mib(1, 3, 3, 3)
    work = scheduled(one, FABRIC, {"partition_bytes": "2MiB", "credit_bytes": "3MiB"})
    found = [(job.nbytes / (1 << 20), job.gate, job.layer) for job in work.jobs]
    halves = [(1.5, gate, gate) for gate in (3, 3, 2, 2, 1, 1)]
    assert found == [*halves, (1.0, 0, 0)]
    assert work.credit_bytes == 3 << 20
    assert [bundle.jobs for bundle in work.bundles] == [(6,), (4, 5), (2, 3), (0, 1)]
    whole = scheduled(one, FABRIC, {"partition_bytes": "16MiB"})
    assert [(job.nbytes >> 20, job.gate) for job in whole.jobs] == [(10, 0)]
    assert max(job.nbytes for job in scheduled(model(), FABRIC, {}).jobs) < 2 << 20
    nccl = scheduled(model(), replace(FABRIC, overlaps=False), {})
    assert max(job.nbytes for job in nccl.jobs) > 8 << 20


@pytest.mark.parametrize("clip", [False, True])
def test_no_system_is_faster_than_the_bound(clip: bool) -> None:
    systems = parse_systems("ddp-best,bytesched" if clip else "ddp,bytesched", SYSTEMS)
    case = Case(model("vgg", clip=clip), FABRIC, systems)
    for one in case.predictions():
        assert one.iteration_s >= bound_s(case.model, case.fabric) * (1 - 1e-12)


def on(cores: float, load: float = 0.0) -> Model:
    costs = replace(LAB_COSTS, cores=Cores(cores), cpu_load=load)
    return Model(load_profile("gpt"), costs)


def predicted(model: Model) -> list[Prediction]:
    return [predict(one, model, FABRIC) for one in parse_systems(",".join(SYSTEMS), SYSTEMS)]


def test_cores_enough_are_as_good_as_any_number() -> None:
    assert predicted(on(1e6)) == predicted(on(float("inf")))
    assert predicted(on(1e6, 1.0)) == predicted(on(float("inf"), 1.0))
    assert predicted(on(4.0, 1.0)) == predicted(on(float("inf"), 1.0))


def test_a_model_that_computes_on_the_cores_needs_them_too() -> None:
    beside, alone = predicted(on(1.0, 1.0)), predicted(on(1.0, 0.0))
    for one, other in zip(beside, alone, strict=True):
        assert one.iteration_s > other.iteration_s
