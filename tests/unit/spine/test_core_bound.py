"""How good a plan is: chunks sent as planned over a modelled link, against T* and the bound."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytesched.ahead import ChunkTimes, Link, gate_times, plan_order
from bytesched.bench.profile import load_profile
from bytesched.link.bound import Layer, gradients, optimum_s

BYTES_PER_S = 1000.0


@dataclass(frozen=True)
class Job:
    layers: list[Layer]
    bytes_per_s: float = BYTES_PER_S

    @property
    def fluid_optimum_s(self) -> float:
        compute_s = sum(layer.forward_s + layer.backward_s for layer in self.layers)
        return optimum_s(gradients(self.layers), compute_s, self.bytes_per_s)

    def bound_s(self, overhead_s: float = 0.0, *, partition_bytes: int, credit_bytes: int) -> float:
        """What a priority schedule with partitions and credit never exceeds (see bound.py)."""
        chunks = self.chunks(partition_bytes)
        inversion_bytes = credit_bytes + max(chunk.nbytes for chunk in chunks)
        return self.fluid_optimum_s + overhead_s * len(chunks) + inversion_bytes / self.bytes_per_s

    def chunks(self, partition_bytes: int) -> list[ChunkTimes]:
        """No chunk spans two layers."""
        return [
            ChunkTimes(min(partition_bytes, int(one.nbytes) - start), one.release_s, layer)
            for layer, one in enumerate(gradients(self.layers))
            for start in range(0, int(one.nbytes), partition_bytes)
        ]

    def took_s(
        self,
        policy: str = "priority",
        /,
        *,
        partition_bytes: int,
        credit_bytes: int,
        overhead_s: float = 0.0,
    ) -> float:
        """From the beginning of backward to the end of forward."""
        chunks = self.chunks(partition_bytes)
        link = Link(1 / self.bytes_per_s, overhead_s)
        order = plan_order(chunks, link, policy=policy, credit_bytes=credit_bytes)
        gates = [layer.forward_s for layer in self.layers]
        return gate_times(order, chunks, link, gates)[-1] + gates[-1]


drawn = st.builds(
    Layer,
    forward_s=st.floats(0.01, 1),
    backward_s=st.floats(0.01, 2),
    nbytes=st.sampled_from([0, 1, 40, 300, 1000, 4000]),
)
#: the first layer has gradients, so that the last of them is there when backward ends
jobs = st.builds(
    lambda first, rest: Job([first, *rest]),
    drawn.filter(lambda layer: layer.nbytes > 0),
    st.lists(drawn, max_size=9),
)
sizes = {
    "partition_bytes": st.sampled_from([50, 100, 250, 1000, 5000]),
    "credit_bytes": st.sampled_from([1, 100, 400, 2000]),
    "overhead_s": st.sampled_from([0.0, 0.01, 0.05]),
}


@given(job=jobs, **sizes)
def test_the_schedule_keeps_the_bound(
    job: Job, partition_bytes: int, credit_bytes: int, overhead_s: float
) -> None:
    sent = {"partition_bytes": partition_bytes, "credit_bytes": credit_bytes}
    took_s = job.took_s(overhead_s=overhead_s, **sent)
    assert job.fluid_optimum_s - 1e-9 <= took_s <= job.bound_s(overhead_s, **sent) + 1e-9


def test_the_bound_is_not_loose() -> None:
    """The first layer's gradient, ready last, waits for the chunk that has just begun."""
    job = Job([Layer(10.0, 0.001, 10), Layer(0.1, 1.0, 1000)])
    bound_s = job.bound_s(partition_bytes=1000, credit_bytes=1)
    lost_s = job.took_s(partition_bytes=1000, credit_bytes=1) - job.fluid_optimum_s
    assert lost_s > 0.99 * (bound_s - job.fluid_optimum_s)


@settings(max_examples=25)
@given(job=jobs)
def test_tiny_chunks_without_overhead_reach_the_optimum(job: Job) -> None:
    took_s = job.took_s(partition_bytes=4, credit_bytes=1)
    assert took_s == pytest.approx(job.fluid_optimum_s, abs=2 * 6 / BYTES_PER_S)


def test_fifo_makes_the_first_layer_wait_and_breaks_the_bound() -> None:
    """A large last layer is released first, and the first layer, small, is needed first."""
    job = Job([Layer(0.1, 0.1, 100), Layer(2.0, 0.1, 100), Layer(1.0, 0.1, 3000)])
    fifo_s = job.took_s("fifo", partition_bytes=100, credit_bytes=100)
    priority_s = job.took_s(partition_bytes=100, credit_bytes=100)
    # fifo: the last layer's 3 s go first, then 0.2 s, then the whole forward pass.
    assert fifo_s == pytest.approx(0.1 + 3.0 + 0.2 + 3.1)
    assert priority_s == pytest.approx(job.fluid_optimum_s, abs=0.2)
    assert fifo_s > job.bound_s(partition_bytes=100, credit_bytes=100)


@pytest.mark.parametrize("overhead_s", [0.0, 3e-4, 1e-3])
@pytest.mark.parametrize("ratio", [0.7, 1.0, 1.5])
@pytest.mark.parametrize("name", ["gpt", "vgg", "resnet"])
def test_blocks_that_are_foreseen_take_no_more_time(
    name: str, ratio: float, overhead_s: float
) -> None:
    profile = load_profile(name)
    profile = profile.scaled(profile.nbytes / 118e6 / (profile.compute_s * ratio))
    job = Job(profile.chain(), 118e6)
    sent = {"partition_bytes": 1 << 20, "credit_bytes": 2 << 20, "overhead_s": overhead_s}
    assert job.took_s("prophet", **sent) <= 1.001 * job.took_s("priority", **sent)  # type: ignore[arg-type]
