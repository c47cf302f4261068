"""The burst runtime within one process."""

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
from torch import nn

from bytesched.burst.cost import Place, PlacedBranches
from bytesched.burst.graph import Branches, Layer, layers_of, load_graph
from bytesched.commands import burst
from bytesched.errors import BackgroundError, PluginError
from bytesched.plugins.burst import Background, Branched, plan_for, record, structure

WAIT_S = 20.0


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
def test_a_background_step_that_raises_ends_the_background_alone(kind: type[BaseException]) -> None:
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
    graph = load_graph([f"{tmp_path}/mine.json"])
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
    assert burst.main(arguments) == 0
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
