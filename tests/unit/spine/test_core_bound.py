"""How good the schedule is: the real core over a modelled link against T* and the bound."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_iteration import SimulatedIteration, simulate

from bytesched.link.bound import Layer, gradients, optimum_s, schedule_bound_s
from bytesched.policy import Fifo, Policy, Priority

BYTES_PER_S = 1000.0


@dataclass(frozen=True)
class Job:
    layers: list[Layer]

    @property
    def fluid_optimum_s(self) -> float:
        compute_s = sum(layer.forward_s + layer.backward_s for layer in self.layers)
        return optimum_s(gradients(self.layers), compute_s, BYTES_PER_S)

    def simulate(
        self,
        policy: Policy,
        *,
        partition_bytes: int,
        credit_bytes: int,
        overhead_s: float = 0.0,
        merge: bool = False,
    ) -> SimulatedIteration:
        return simulate(
            [gradient.release_s for gradient in gradients(self.layers)],
            [int(layer.nbytes) for layer in self.layers],
            [layer.forward_s for layer in self.layers],
            bytes_per_s=BYTES_PER_S,
            overhead_s=overhead_s,
            partition_bytes=partition_bytes,
            credit_bytes=credit_bytes,
            policy=policy,
            merge=merge,
        )


jobs = st.builds(
    Job,
    st.lists(
        st.builds(
            Layer,
            forward_s=st.floats(0.01, 1),
            backward_s=st.floats(0.01, 2),
            nbytes=st.sampled_from([0, 1, 40, 300, 1000, 4000]),
        ),
        min_size=1,
        max_size=10,
    ).filter(lambda layers: any(layer.nbytes for layer in layers)),
)
sizes = {
    "partition_bytes": st.sampled_from([50, 100, 250, 1000, 5000]),
    "credit_bytes": st.sampled_from([1, 100, 400, 2000]),
    "overhead_s": st.sampled_from([0.0, 0.01, 0.05]),
}


@given(job=jobs, merge=st.booleans(), **sizes)
def test_the_schedule_keeps_the_bound(
    job: Job, merge: bool, partition_bytes: int, credit_bytes: int, overhead_s: float
) -> None:
    took = job.simulate(
        Priority(),
        partition_bytes=partition_bytes,
        credit_bytes=credit_bytes,
        overhead_s=overhead_s,
        merge=merge,
    )
    largest_bytes = max(chunk.nbytes for _, chunk in took.starts)
    bound_s = schedule_bound_s(
        job.fluid_optimum_s,
        chunks=len(took.starts),
        overhead_s=overhead_s,
        partition_bytes=largest_bytes,
        credit_bytes=credit_bytes,
        bytes_per_s=BYTES_PER_S,
    )
    # A chunk of several layers waits for the last of them while its other bytes could be sent.
    waiting_s = largest_bytes / BYTES_PER_S if merge else 0.0
    assert took.step_s <= bound_s + waiting_s + 1e-9
    assert took.step_s >= job.fluid_optimum_s - 1e-9


@settings(max_examples=25)
@given(job=jobs)
def test_tiny_chunks_without_overhead_reach_the_optimum(job: Job) -> None:
    took = job.simulate(Priority(), partition_bytes=4, credit_bytes=1)
    assert took.step_s == pytest.approx(job.fluid_optimum_s, abs=2 * 6 / BYTES_PER_S)


def test_the_gap_to_the_optimum_shrinks_with_the_chunks() -> None:
    job = Job([Layer(forward_s=1.0, backward_s=0.5, nbytes=size) for size in (300, 2000, 4000)])
    gaps_s = [
        job.simulate(Priority(), partition_bytes=size, credit_bytes=size).step_s
        - job.fluid_optimum_s
        for size in (4000, 1000, 250, 50, 10)
    ]
    assert gaps_s == sorted(gaps_s, reverse=True)
    assert gaps_s[0] > 0.5
    assert gaps_s[-1] < 0.03


def built_job() -> Job:
    """A large last layer is released first, and the first layer, small, is needed first."""
    return Job([Layer(0.1, 0.1, 100), Layer(2.0, 0.1, 100), Layer(1.0, 0.1, 3000)])


def test_fifo_makes_the_first_layer_wait_and_priority_does_not() -> None:
    job = built_job()
    fifo = job.simulate(Fifo(), partition_bytes=100, credit_bytes=100)
    priority = job.simulate(Priority(), partition_bytes=100, credit_bytes=100)
    # fifo: the last layer's 3 s go first, then 0.2 s, then the whole forward pass.
    assert fifo.step_s == pytest.approx(0.1 + 3.0 + 0.2 + 3.1)
    assert priority.step_s == pytest.approx(job.fluid_optimum_s, abs=0.2)
    assert fifo.step_s > 1.4 * priority.step_s


def test_the_bound_is_about_priority_fifo_breaks_it() -> None:
    job = built_job()
    took = job.simulate(Fifo(), partition_bytes=100, credit_bytes=100)
    assert took.step_s > schedule_bound_s(
        job.fluid_optimum_s,
        chunks=len(took.starts),
        overhead_s=0.0,
        partition_bytes=150,
        credit_bytes=100,
        bytes_per_s=BYTES_PER_S,
    )


def test_merging_small_layers_saves_their_overhead() -> None:
    job = Job([Layer(forward_s=0.01, backward_s=0.02, nbytes=10) for _ in range(60)])
    apart, merged = (
        job.simulate(
            Priority(), partition_bytes=100, credit_bytes=200, overhead_s=0.05, merge=merge
        )
        for merge in (False, True)
    )
    assert len(apart.starts) == 60
    assert len(merged.starts) == 6
    assert merged.step_s < 0.6 * apart.step_s


def test_the_link_is_never_idle_while_something_waits() -> None:
    took = built_job().simulate(Fifo(), partition_bytes=100, credit_bytes=1)
    gaps_s = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(took.finishes)]
    assert gaps_s == pytest.approx([0.1] * len(gaps_s))
    assert took.finishes[0][0] == pytest.approx(0.2)


def test_a_simulation_is_repeatable() -> None:
    def story() -> list[tuple[float, str]]:
        took = built_job().simulate(Priority(), partition_bytes=70, credit_bytes=150)
        return [(at_s, chunk.name) for at_s, chunk in (*took.starts, *took.finishes)]

    assert story() == story()


def test_a_model_without_gradients_only_computes() -> None:
    took = Job([Layer(1.0, 2.0, 0), Layer(1.0, 2.0, 0)]).simulate(
        Priority(), partition_bytes=1, credit_bytes=1, merge=True
    )
    assert took.step_s == pytest.approx(6.0)
    assert took.starts == ()
