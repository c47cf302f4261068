"""The burst runtime: any plan trains as data parallelism does."""

from __future__ import annotations

import copy
import json
import threading
from collections import Counter
from pathlib import Path

import burst_cases
import pytest
import torch
from fake_cuda import CUDA, Clock, after, fake_cuda
from ranks import Ranks, run_fresh
from torch import nn

from bytesched.burst import command
from bytesched.burst.cost import Place, PlacedBranches
from bytesched.burst.graph import Branches, Layer, layers_of, load_graph
from bytesched.errors import BackgroundError, PluginError
from bytesched.plugins.bench.systems.burst import scaled
from bytesched.plugins.bench.workloads.device import Device, emulated_model
from bytesched.plugins.burst import Background, Branched, plan_for, record, structure
from bytesched.trace.reading import merge_traces, read_traces
from bytesched.trace.timeline import trace_name

WAIT_S = 20.0


@pytest.mark.procs
@pytest.mark.parametrize("name", burst_cases.CASES)
def test_a_plan_trains_as_data_parallelism_does(name: str, four_ranks: Ranks) -> None:
    figures = four_ranks.run(burst_cases.equals_data_parallel, name)
    if name == "vgg-uniform":
        assert figures[0]["move_bytes"] == 0
        assert figures[0]["mode/0-3"] == "cross"
    elif name == "vgg-on-two-ranks":
        assert figures[0]["move_bytes"] == 0
        assert figures[0]["mode/0-1"] == "cross"
    else:
        assert figures[0]["move_bytes"] > 0
        assert figures[3]["move_wait_ms"] > 0


@pytest.mark.procs
def test_samples_may_have_another_size_in_each_step(four_ranks: Ranks) -> None:
    four_ranks.run(burst_cases.equals_data_parallel, "resnet", (8, 12))


@pytest.mark.procs
def test_a_rank_that_closes_waits_for_those_that_are_behind(four_ranks: Ranks) -> None:
    changes = four_ranks.run(burst_cases.closes_while_another_is_behind)
    assert all(changes[0])


@pytest.mark.procs
def test_training_begins_with_the_weights_of_rank_0(four_ranks: Ranks) -> None:
    first, *others = four_ranks.run(burst_cases.first_weights_are_rank_0s)
    assert others == [first] * 3


@pytest.mark.procs
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("ranks", "planned for ranks 0 to 7, and there are 4 ranks"),
        ("first", "a model begins with a layer"),
        ("length", "the plan has 3 layers for the model, which has 4"),
        ("norm", "use nn.GroupNorm"),
        ("shared", "2 and 3 share a parameter"),
        ("join", "the join of 1 is planned for ranks 0 to 7, and there are 4 ranks"),
        ("plans", "MismatchError: the ranks disagree: rank 0 has '1: Place(first=0, width=2)'"),
        ("models", "MismatchError: the ranks disagree: rank 0 has '2.1.weight (32, 64)"),
        ("settings", "rank 0 has \"compression = 'none'\", rank 3 has \"compression = 'bf16'\""),
    ],
)
def test_what_cannot_be_run_is_refused(what: str, message: str, four_ranks: Ranks) -> None:
    for said in four_ranks.run(burst_cases.refused, what):
        assert message in said
        assert "and left" not in said


@pytest.mark.procs
def test_a_first_broadcast_that_fails_leaves_nothing_open(four_ranks: Ranks) -> None:
    *others, failed = four_ranks.run(burst_cases.first_broadcast_fails)
    assert failed == "MemoryError: no room and left 0 groups"
    for said in others:
        assert "rank 3 said: MemoryError: no room" in said
        assert said.endswith("and left 0 groups")


@pytest.mark.procs
def test_a_closed_burst_says_so(four_ranks: Ranks) -> None:
    for rank, said in enumerate(four_ranks.run(burst_cases.used_after_it_was_closed)):
        assert said == [
            f"SchedulerClosed: rank {rank}: {what}() of a Burst that is closed; make another one"
            for what in ("step", "forward", "gather")
        ]


@pytest.mark.procs
def test_a_rank_without_an_optimizer_is_heard_of_at_once(four_ranks: Ranks) -> None:
    *others, failed = four_ranks.run(burst_cases.makes_no_optimizer)
    assert failed == "RuntimeError: no optimizer and left 0 groups"
    for said in others:
        assert said == (
            "PluginError: rank 3 could not make its optimizers: RuntimeError: no optimizer "
            "and left 0 groups"
        )


@pytest.mark.procs
def test_the_background_changes_nothing_and_learns_as_alone(
    four_ranks: Ranks, tmp_path: Path
) -> None:
    steps = four_ranks.run(burst_cases.shares_its_gaps, str(tmp_path))
    assert sum(steps) > 0
    merged, complaints = merge_traces(sorted(tmp_path.glob(trace_name("*"))))
    assert not complaints
    (tmp_path / "run.json").write_text(json.dumps({"traceEvents": merged}))
    for trace, ran in zip(read_traces(tmp_path / "run.json"), steps, strict=True):
        assert len(trace.iterations()) == burst_cases.SHARED_STEPS - 1
        assert len(trace.track("background")) == ran
        sent = {span.name for span in trace.track("send")}
        # A move each way, and gradients of the layers that are on several ranks.
        assert {"to 1", "from 1"} <= sent
        assert any("weight" in name or "bias" in name for name in sent)


@pytest.mark.procs
@pytest.mark.parametrize("victim", [0, 3])
def test_when_a_rank_dies_the_others_say_so(victim: int) -> None:
    ended = run_fresh(burst_cases.loses_a_rank, 4, timeout_s=40.0, args=(victim,))
    for rank, exited in enumerate(ended):
        if rank == victim:
            assert exited.code == burst_cases.DIED
        else:
            assert exited.code == 0, exited.stderr
            assert exited.stdout.strip() in {"PeerLost", "SchedulerTimeout"}, exited.stdout


@pytest.mark.procs
def test_a_rank_that_dies_in_the_middle_of_the_last_move_is_missed() -> None:
    _, survivor = run_fresh(burst_cases.dies_while_it_receives, timeout_s=45.0)
    assert survivor.stdout.split() == ["stepped", "PeerLost"], survivor.stderr
    assert survivor.code == 0


@pytest.mark.procs
def test_an_error_of_one_rank_ends_the_others(four_ranks: Ranks) -> None:
    said = four_ranks.run(burst_cases.raises_on_one_rank)
    assert said[2] == "RuntimeError: out of luck"
    assert all("PeerLost" in said[rank] for rank in (0, 1, 3)), said


@pytest.mark.procs
def test_a_rank_that_stays_away_is_not_waited_for_without_end(four_ranks: Ranks) -> None:
    said = four_ranks.run(burst_cases.is_kept_waiting)
    assert set(said) <= {"SchedulerTimeout", "PeerLost"}, said
    assert "SchedulerTimeout" in said[:3]


@pytest.mark.procs
def test_a_rank_that_never_comes_is_not_waited_for_without_end(four_ranks: Ranks) -> None:
    said = four_ranks.run(burst_cases.does_not_come)
    assert said[3] == "RuntimeError: lost"
    assert all(text.startswith(("SchedulerTimeout", "PeerLost")) for text in said[:3]), said
    assert any(text.startswith("SchedulerTimeout") for text in said[:3]), said


@pytest.mark.procs
@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_rank_that_cannot_connect_is_heard_of_at_once(at: int, four_ranks: Ranks) -> None:
    *others, failed = four_ranks.run(burst_cases.does_not_connect, at)
    assert failed == "MemoryError: no room and left 0 groups"
    for said in others:
        assert said.startswith("PeerLost")
        assert "rank 3 said: MemoryError: no room" in said
        assert said.endswith("and left 0 groups")


@pytest.mark.procs
def test_a_rank_that_dies_while_others_connect_is_missed_at_once() -> None:
    *others, dead = run_fresh(burst_cases.dies_while_others_connect, 4, timeout_s=40.0)
    assert dead.code == burst_cases.DIED
    for survivor in others:
        assert survivor.stdout.startswith("PeerLost"), survivor.stdout + survivor.stderr
        assert survivor.code == 0, survivor.stderr


class Waiting:
    """A foreground that waits in one gap per iteration until it is told to go on."""

    def __init__(self, background: Background) -> None:
        self.background = background

    def iterate(self, times: int = 1, until: threading.Event | None = None) -> None:
        for _ in range(times):
            self.background.iteration_begins()
            with self.background.gap("gap"):
                assert until is None or until.wait(WAIT_S)
            self.background.iteration_ends()


@pytest.mark.parametrize("kind", [RuntimeError, SystemExit])
def test_a_background_step_that_raises_ends_the_background_alone(
    kind: type[BaseException],
) -> None:
    began = threading.Event()

    def step() -> None:
        began.set()
        raise kind("no more data")

    background = Background(step)
    foreground = Waiting(background)
    foreground.iterate(4)
    assert not began.is_set()
    foreground.iterate(until=began)
    foreground.iterate(3)
    said = f"step 0 raised {kind.__name__}: no more data"
    with pytest.raises(BackgroundError, match=said) as raised:
        background.close()
    assert isinstance(raised.value.__cause__, kind)


def test_a_background_on_a_device_that_is_not_there_says_so() -> None:
    background = Background(lambda: None, device=torch.device("cuda", 99))
    with pytest.raises(BackgroundError, match="making a stream on cuda:99 raised"):
        background.close()


def test_a_background_step_that_hangs_does_not_hold_the_foreground() -> None:
    began, release = threading.Event(), threading.Event()

    def step() -> None:
        began.set()
        release.wait(WAIT_S)

    background = Background(step, step_timeout_s=0.01)
    foreground = Waiting(background)
    foreground.iterate(4)
    foreground.iterate(until=began)
    foreground.iterate(3)
    with pytest.raises(BackgroundError, match="has not returned for"):
        background.close()
    release.set()


def test_a_paused_background_does_not_begin() -> None:
    began = threading.Event()
    background = Background(began.set)
    background.pause()
    foreground = Waiting(background)
    foreground.iterate(6)
    assert not began.is_set()
    background.resume()
    foreground.iterate(until=began)
    background.close()
    assert background.steps >= 1


def a_plan_file(folder: Path, **widths: int) -> Path:
    layers = [
        {"name": name.replace("_", "."), "first": 0, "width": width}
        for name, width in widths.items()
    ]
    (folder / "plan.json").write_text(json.dumps({"plan": layers}))
    return folder / "plan.json"


def test_a_plan_of_recorded_modules_fits_the_model(tmp_path: Path) -> None:
    model = nn.Sequential(
        nn.ReLU(),
        nn.Conv2d(3, 4, 3),
        nn.ReLU(),
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        nn.Linear(4, 2),
    )
    path = a_plan_file(tmp_path, **{"1": 4, "3_0": 1, "3_1": 2, "4": 1})
    assert [place.width for place in plan_for(model, path) if isinstance(place, Place)] == [
        *(4, 4, 4),
        2,
        1,
    ]
    # As many recorded modules as children, but not one in each.
    path = a_plan_file(tmp_path, **{"0_0": 1, "0_1": 2})
    pair = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.ReLU())
    assert plan_for(pair, path) == (Place(0, 2), Place(0, 2))
    path = a_plan_file(tmp_path, conv=4, fc=1)
    assert plan_for(pair, path) == (Place(0, 4), Place(0, 1))
    block = {"name": "1", "first": 0, "width": 2, "lanes": [0], "branches": [[]]}
    path.write_text(json.dumps({"plan": [{"name": "0", "first": 0, "width": 4}, block]}))
    assert plan_for(pair, path) == (Place(0, 4), PlacedBranches(((),), (0,), Place(0, 2)))
    path = a_plan_file(tmp_path, **{"1": 4, "2": 4, "3": 4, "9": 4})
    with pytest.raises(PluginError, match="4 layers, 3 of which"):
        plan_for(model, path)


def test_on_cuda_one_step_at_a_time_is_queued_on_a_stream_of_its_own() -> None:
    steps: list[Clock] = []
    host_before: list[Clock] = []
    enough = threading.Event()

    def step() -> None:
        host_before.append(Counter(CUDA.host))
        steps.append(CUDA.current().queue())
        assert CUDA.current() is not CUDA.default
        if len(steps) == 2:
            enough.set()

    with fake_cuda():
        made = CUDA.default.queue()
        background = Background(step, device=torch.device("cuda", 0))
        foreground = Waiting(background)
        foreground.iterate(4)
        foreground.iterate(until=enough)
        background.close()
    assert after(steps[0], made)
    # The host has seen the end of each step before the next one is queued.
    assert all(after(host, place) for place, host in zip(steps, host_before[1:], strict=False))


def test_a_model_with_branches_is_recorded_planned_and_placed(tmp_path: Path) -> None:
    model = burst_cases.inception_like()
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(0)
    record(model, torch.randn(4, 3, 8, 8), tmp_path / "mine.json")
    drawn = torch.rand(1)
    torch.manual_seed(0)
    torch.randn(4, 3, 8, 8)
    assert torch.equal(drawn, torch.rand(1)), "random numbers were drawn"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    graph = load_graph([f"{tmp_path}/mine.json"], fixed_share=0.2)
    assert (graph.batch, graph.assumed) == (4, "")
    entry, block, head = graph.chain
    assert isinstance(entry, Layer)
    assert [samples for samples, _ in entry.forward.points] == [1, 2, 4]
    assert entry.forward.ns(4) > 0
    assert entry.backward.ns(4) > 0
    assert (entry.parameter_bytes, entry.output_bytes) == (4 * (6 * 3 * 9 + 6), 4 * 6 * 64)
    assert isinstance(block, Branches)
    assert [len(branch) for branch in block.branches] == [2, 1, 2, 0]
    assert isinstance(block.branches[2][1], Branches)
    assert (block.output_bytes, head.output_bytes) == (4 * 18 * 64, 4 * burst_cases.CLASSES)
    plan_file = str(tmp_path / "plan.json")
    arguments = ["plan", "--profile", f"{tmp_path}/mine.json", "--gpus", "2", "--json", plan_file]
    assert command.main(arguments) == 0
    items = structure.items_of(model, plan_for(model, plan_file), "")
    assert len(list(structure.layers_of(items))) == len(list(layers_of(graph.chain)))


@pytest.mark.parametrize(
    ("batches", "message"),
    [((1, 5), "from 1 to 4"), ((0, 2), "from 1 to 4"), ((), "the model begins with branches")],
)
def test_what_cannot_be_recorded_is_refused(
    batches: tuple[int, ...], message: str, tmp_path: Path
) -> None:
    model = nn.Sequential(Branched(nn.Sequential(nn.Linear(2, 2)), nn.Sequential()))
    with pytest.raises(PluginError, match=message):
        record(model, torch.randn(4, 2), tmp_path / "mine.json", batches=batches)
    assert not (tmp_path / "mine.json").exists()


def test_an_emulated_model_has_the_sizes_of_its_graph() -> None:
    graph = scaled(load_graph(["inception_v3"], fixed_share=0.2), 0.0, 0.001)
    layers = list(layers_of(graph.chain))
    model = emulated_model(graph.chain, Device())
    outputs = model(torch.ones(2, 4))
    outputs.sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert [4 * len(g) for g in gradients if g is not None] == [
        max(4, layer.parameter_bytes // 4 * 4) for layer in layers
    ]
    assert outputs.shape == (2, max(1, layers[-1].output_bytes // 4))
