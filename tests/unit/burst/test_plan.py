"""The planner: optimal against every plan there is, its timeline, its files and its command."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytesched.burst.compare import data_parallel, gaps_ns, static_partitions, uniform_plan
from bytesched.burst.cost import (
    Cluster,
    Place,
    PlacedBranches,
    Plan,
    Task,
    busiest_samples,
    schedule,
)
from bytesched.burst.graph import (
    Branches,
    Chain,
    Curve,
    Layer,
    ModelGraph,
    curve_from_one,
    layers_of,
    load_graph,
)
from bytesched.burst.items import capacities, lanes_of
from bytesched.burst.planfile import load_named_plan
from bytesched.burst.search import fastest_plan
from bytesched.errors import ConfigError

BATCH = 4

times = st.integers(1, 60).map(lambda us: us * 1000)
sizes = st.sampled_from([0, 1000, 10_000, 40_000, 400_000])


@st.composite
def a_layer(draw: st.DrawFn) -> Layer:
    """A layer that gains from more devices, a little or much, or loses."""
    curves = []
    for _ in range(2):
        whole_ns = draw(times)
        shares = sorted(draw(st.lists(st.integers(10, 100), min_size=2, max_size=2)))
        ns = [whole_ns * share // 100 for share in shares] + [whole_ns]
        curves.append(Curve(((1, ns[0]), (2, ns[1]), (4, ns[2]))))
    return Layer("layer", curves[0], curves[1], draw(sizes), draw(sizes))


@st.composite
def a_task(draw: st.DrawFn) -> Task:
    """A chain, or a layer and a block with branches, small enough for every plan to be tried."""
    chain: Chain
    if draw(st.booleans()):
        chain = tuple(draw(st.lists(a_layer(), min_size=1, max_size=4)))
    else:
        branches = draw(
            st.lists(st.lists(a_layer(), max_size=2).map(tuple), min_size=2, max_size=2)
        )
        block = Branches("block", tuple(branches), draw(sizes))
        tail = draw(st.lists(a_layer(), max_size=1))
        chain = (draw(a_layer()), block, *tail)
    devices = draw(st.sampled_from([2, 4]))
    cluster = Cluster(devices, draw(st.sampled_from([1e9, 2e10])), draw(st.sampled_from([0, 2e-6])))
    graph = ModelGraph("random", "", BATCH, chain)
    return Task(graph, cluster, draw(st.sampled_from([1.0, 1.2, 1.6, 4.0])))


def every_plan(task: Task, chain: Chain, lane: Place) -> Iterator[Plan]:
    """All plans of a chain within a lane that every layer admits, budget or not."""
    per_item = [list(every_place(task, item, lane)) for item in chain]
    yield from itertools.product(*per_item)


def every_place(
    task: Task, item: Layer | Branches, lane: Place
) -> Iterator[Place | PlacedBranches]:
    widths = [width for width in task.graph.widths(task.cluster.devices) if width <= lane.width]
    if isinstance(item, Layer):
        for width in widths:
            if task.admits(item, width):
                yield Place(lane.first, width)
        return
    for lanes in lanes_of(len(item.branches), widths, lane.width):
        for capacity in capacities(max(lanes) + 1, tuple(widths), lane.width):
            firsts = [lane.first + sum(capacity[:index]) for index in range(len(capacity))]
            per_branch = [
                list(every_plan(task, branch, Place(firsts[number], capacity[number])))
                for branch, number in zip(item.branches, lanes, strict=True)
            ]
            for plans in itertools.product(*per_branch):
                for width in widths:
                    yield PlacedBranches(plans, lanes, Place(lane.first, width))


@settings(max_examples=75)
@given(task=a_task())
def test_no_plan_is_faster_within_the_budget(task: Task) -> None:
    found = fastest_plan(task)
    timelines = [
        schedule(task, plan)
        for plan in every_plan(task, task.graph.chain, Place(0, task.cluster.devices))
    ]
    allowed = [timeline for timeline in timelines if timeline.device_ns <= task.budget_ns]
    assert found.schedule.device_ns <= task.budget_ns
    assert found.schedule.time_ns == min(timeline.time_ns for timeline in allowed)


def layer(name: str, ms: float, *, parameters: int = 0, output: int = 0) -> Layer:
    """A layer that scales perfectly: a third of its time is forward."""
    forward, backward = (
        Curve(tuple((size, round(1e6 * share * ms * size / 8)) for size in (1, 8)))
        for share in (1 / 3, 2 / 3)
    )
    return Layer(name, forward, backward, parameters, output)


def stiff(name: str, ms: float, *, parameters: int = 0, output: int = 0) -> Layer:
    """A layer that more devices do not help."""
    curve = Curve(((1, round(5e5 * ms)), (8, round(5e5 * ms))))
    return Layer(name, curve, curve, parameters, output)


def test_gradients_hide_behind_the_backward_pass_of_what_is_in_front() -> None:
    chain = (layer("front", 80), layer("back", 8, parameters=10**8))
    task = Task(ModelGraph("", "", 8, chain), Cluster(8, 1e10, 0.0), 8.0)
    timeline = schedule(task, (Place(0, 8), Place(0, 8)))
    gradients_ns = task.cluster.gradients_ns(chain[1], 8)
    assert gradients_ns == 17_500_000
    # Forward, backward of the last layer, then its gradients; front's backward is over by then.
    assert timeline.time_ns == pytest.approx(11e6 / 3 + 2e6 / 3 + gradients_ns, abs=10)
    assert timeline.computed_ns == pytest.approx(11e6, abs=10)
    # Two devices halve its compute, and the backward pass in front hides 10 ms of gradients; the
    # 4 ms saved would not be worth it if they were added.
    assert fastest_plan(task).plan == (Place(0, 8), Place(0, 2))


def test_every_layer_gets_what_it_scales_to() -> None:
    chain = (layer("wide", 80), stiff("narrow", 4), layer("wide again", 80))
    graph = ModelGraph("", "", 8, chain)
    found = fastest_plan(Task(graph, Cluster(8, 1e12, 1e-6), 2.0))
    assert found.plan == (Place(0, 8), Place(0, 1), Place(0, 8))
    idle = gaps_ns(found.schedule, 8)
    assert not idle[0]
    assert sum(end - start for start, end in idle[7]) == pytest.approx(4e6, abs=1e5)


@pytest.mark.parametrize("amplification", [0.5, 0.999])
def test_less_than_one_device_is_refused(amplification: float) -> None:
    task = Task(ModelGraph("", "", 8, (layer("one", 1),)), Cluster(2, 1e9, 0.0), amplification)
    with pytest.raises(ConfigError, match="1 is the least"):
        fastest_plan(task)


def test_lanes_leave_no_devices_unused() -> None:
    assert capacities(1, (1, 2, 4, 8), 8) == ((8,),)
    assert capacities(2, (1, 2, 4, 8), 8) == ((4, 4),)
    assert capacities(3, (1, 2, 4), 4) == ((1, 1, 2), (1, 2, 1), (2, 1, 1))
    assert capacities(2, (1, 3), 5) == ((1, 3), (3, 1))
    assert set(lanes_of(2, (1, 2), 2)) == {(0, 0), (0, 1), (1, 0)}
    assert list(lanes_of(2, (1,), 1)) == [(0, 0)]


def test_samples_stay_where_they_can() -> None:
    assert busiest_samples(8, Place(0, 4), Place(0, 4)) == 0
    # Each of two devices keeps two of its four samples and sends two.
    assert busiest_samples(8, Place(0, 2), Place(0, 4)) == 2
    assert busiest_samples(8, Place(0, 1), Place(0, 8)) == 7
    assert busiest_samples(8, Place(0, 2), Place(2, 2)) == 4


def test_times_between_measured_batch_sizes() -> None:
    curve = Curve(((2, 100), (4, 180)))
    assert [curve.ns(samples) for samples in (1, 2, 3, 4, 8)] == [100, 100, 140, 180, 340]
    guessed = curve_from_one(10, 1000)
    assert [guessed.ns(samples) for samples in (1, 5, 10)] == [280, 600, 1000]


@pytest.mark.parametrize(
    ("name", "layers", "parameters_millions"),
    [("vgg16", 16, 138.36), ("wide_resnet101_2", 105, 126.89), ("inception_v3", 95, 23.83)],
)
def test_shipped_profiles_are_the_published_models(
    name: str, layers: int, parameters_millions: float
) -> None:
    found = list(layers_of(load_graph([name]).chain))
    assert len(found) == layers
    total = sum(one.parameter_bytes for one in found) / 4e6
    assert total == pytest.approx(parameters_millions, rel=1e-3)


def test_plain_data_parallelism_and_static_partitions() -> None:
    chain = (layer("one", 8), layer("two", 8))
    task = Task(ModelGraph("", "", 8, chain), Cluster(8, 1e12, 0.0), 2.0)
    assert data_parallel(task, 8, "").foreground == pytest.approx(8, rel=1e-3)
    points = {point.label: point for point in static_partitions(task)}
    assert list(points) == ["static 1/7", "static 2/6", "static 4/4"]
    assert points["static 2/6"].foreground == pytest.approx(2, rel=1e-3)
    assert points["static 2/6"].background == 6
    assert schedule(task, uniform_plan(chain, Place(0, 1))).time_ns == 16_000_000


def test_command_writes_a_plan_that_can_be_read(tmp_path: Path, said: Callable[..., str]) -> None:
    output = said(
        "burst plan --profile vgg16 --gpus 8 --amplification 2.0 --rate 2400gbit "
        f"--json {tmp_path}/plan.json"
    )
    assert "conv1_1" in output
    assert "static 4/4" in output
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["amplification"] <= 2.0
    graph = load_graph(["vgg16"])
    task = Task(graph, Cluster(8, written["bytes_per_s"], 30e-6), 2.0)
    timeline = schedule(task, tuple(place for _, place in load_named_plan(tmp_path / "plan.json")))
    assert timeline.time_ns / 1e6 == pytest.approx(written["iteration_ms"])


def recorded(batch: int, **fields: object) -> dict[str, object]:
    layers = [
        {"name": n, "forward_ms": ms * batch, "backward_ms": ms, "shapes": [[9]], "output_bytes": 8}
        for n, ms in (("a", 0.5), ("b", 2))
    ]
    return {"name": "mine", "batch": batch, "layers": layers, **fields}


def test_recorded_profiles_of_several_batch_sizes(tmp_path: Path, said: Callable[..., str]) -> None:
    for batch in (8, 2):
        (tmp_path / f"{batch}.json").write_text(json.dumps(recorded(batch)))
    output = said(f"burst plan --profile {tmp_path}/8.json {tmp_path}/2.json --gpus 4")
    assert "mine, batch 8: 22.50 ms on one device" in output
    assert "measured" not in output
    output = said(f"burst plan --profile {tmp_path}/8.json {tmp_path}/2.json --gpus 8")
    assert "fewer than 2 samples, the fewest that were measured" in output
    graph = load_graph([f"{tmp_path}/2.json", f"{tmp_path}/8.json"])
    [first, second] = layers_of(graph.chain)
    assert (first.forward.ns(4), second.backward.ns(4)) == (2_000_000, 2_000_000)
    assert (first.parameter_bytes, first.output_bytes) == (36, 8)


@pytest.mark.parametrize("in_one_file", [False, True], ids=["recorded", "with-batches"])
def test_one_batch_size_is_filled_in_and_said(
    in_one_file: bool, tmp_path: Path, said: Callable[..., str]
) -> None:
    content = recorded(8)
    if in_one_file:
        layer = {"name": "a", "parameter_bytes": 36, "output_bytes": 8}
        content = {"batches": [8], "layers": [layer | {"forward_ms": [4.0], "backward_ms": [0.5]}]}
    (tmp_path / "8.json").write_text(json.dumps(content))
    arguments = f"burst plan --profile {tmp_path}/8.json --gpus 4 --json {tmp_path}/plan.json"
    output = said(arguments)
    assert "only batch size 8 was measured" in output
    assert "20% are taken not to shrink with the batch" in output
    assert "the rest in proportion; " in json.loads((tmp_path / "plan.json").read_text())["assumed"]
    [first, *_] = layers_of(load_graph([f"{tmp_path}/8.json"]).chain)
    assert first.forward.ns(4) == pytest.approx(2_400_000, rel=1e-6)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (recorded(0), "no batch size"),
        (
            {"batch": 2, "layers": [{"forward_ms": 1, "backward_ms": 1, "shapes": [[2]]}] * 2},
            "what its layers hand on",
        ),
        ({"batches": [2, 1], "layers": []}, "growing sizes"),
        ({"batches": [1], "layers": []}, "begins with a layer"),
        ({"batches": [1], "layers": [{"output_bytes": 1}]}, "expected a time in milliseconds for"),
        ({"batches": [1], "layers": [{"output_bytes": -1}]}, "layer 0: output_bytes and param"),
    ],
)
def test_what_is_wrong_with_a_profile_is_named(
    content: object, message: str, tmp_path: Path, said: Callable[..., str]
) -> None:
    (tmp_path / "p.json").write_text(json.dumps(content))
    assert message in said(f"burst plan --profile {tmp_path}/p.json", code=2)
