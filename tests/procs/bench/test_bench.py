"""Small whole runs of the bench, and of the demo."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
from pathlib import Path

import pytest
from tiny import TINY
from torch.nn.parallel import DistributedDataParallel
from warm_python import warm_python

from bytesched.bench.profile import load_profile
from bytesched.bench.systems import SYSTEMS
from bytesched.burst.graph import layers_of, load_graph
from bytesched.cli import INTERRUPTED
from bytesched.commands import bench as bench
from bytesched.trace.reading import read_traces

QUICK = ["--iterations", "2", "--rounds", "2", "--warmup", "3", "--sweep-iterations", "1"]
BROKEN_MODEL = """
import torch
def make():
    def loss(module, seed):
        raise RuntimeError("no such batch")
    return torch.nn.Linear(2, 2), loss
"""


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY))
    return str(path)


def run_module(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [warm_python(), "-m", *arguments], cwd=folder, capture_output=True, text=True, timeout=250
    )


def test_all_systems_on_two_ranks(tiny: str, tmp_path: Path) -> None:
    systems = ["ddp:timeline=runs", *SYSTEMS[1:]]
    options = ["--workers", "2", "--systems", ",".join(systems), *QUICK]
    files = ["--json", "out.json", "--record", "recorded.json"]
    done = run_module("bytesched", "bench", "--emulate", tiny, *options, *files, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    assert list(result["systems"]) == systems
    assert result["world_size"] == 2
    assert 0 <= result["stolen_share"] <= 1
    assert result["workload"] == "tiny (emulated compute)"
    assert result["command"].startswith("bytesched bench --emulate")
    assert result["date"]
    assert result["machine"]["torch"] == result["torch"]
    assert result["setting"]["ranks"] == 2
    ours = result["systems"]["bytesched"]["counts"]
    assert ours["bytes"] == result["compute"]["model_bytes"]
    assert result["compute"]["optimum_ms"] >= result["compute"]["compute_ms"] == 10.5
    for name, system in result["systems"].items():
        assert [len(turn["iteration_ms"]) for turn in system["rounds"]] == [2, 2]
        assert system["figures"]["iteration_ms"] > 10
        expected = {"identical", "equal"} if name == "fsdp2" else {"identical"}
        assert system["losses"] in expected, name
    assert result["systems"]["bytesched"]["rounds"][0]["stats"]["mode"] == "cross"
    assert load_profile(str(tmp_path / "recorded.json")).nbytes == load_profile(tiny).nbytes
    assert "bytesched" in done.stdout
    for rank in range(2):
        (trace,) = read_traces(tmp_path / "runs" / f"rank{rank}.trace.json")
        for one in trace.iterations():
            sent, updated = (
                trace.intervals(track, one.start_ms, one.end_ms) for track in ("send", "update")
            )
            assert sent
            assert len(updated) == 1
            assert one.crossed_ms == 0
            assert sent[-1][1] <= updated[0][0]


#: as it comes, with options, and finalized late
PEERS = ["ddp", "ddp:static_graph=1+bucket_view=1"]
if hasattr(DistributedDataParallel, "finalize_backward"):
    PEERS += ["ddp-finalize", "ddp-finalize:bucket_mb=0.001+bucket_view=1"]


@pytest.mark.nightly
@pytest.mark.parametrize("clip", [[], ["--clip", "0.1"]], ids=["", "clipped"])
def test_forms_of_ddp_train_the_same(clip: list[str], tiny: str, tmp_path: Path) -> None:
    systems = ["--systems", ",".join(PEERS), *clip]
    files = ["--json", "out.json"]
    done = run_module(
        "bytesched", "bench", "--emulate", tiny, *QUICK, *systems, *files, folder=tmp_path
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    assert {name: system["losses"] for name, system in result["systems"].items()} == dict.fromkeys(
        PEERS, "identical"
    )


@pytest.mark.nightly
def test_the_same_is_measured_again_and_compared(tiny: str, tmp_path: Path) -> None:
    sized = "bytesched:partition_bytes=64KiB+credit_bytes=128KiB"
    first = ["--emulate", tiny, "--systems", f"ddp,{sized}", *QUICK, "--json", "old.json"]
    assert run_module("bytesched", "bench", *first, folder=tmp_path).returncode == 0
    again = ["bytesched", "bench", "--compare", "old.json"]
    refused = run_module(*again, "--clip", "1", folder=tmp_path)
    assert refused.returncode == 2
    assert "another setting: clip was 0.0 and is 1.0 now" in refused.stderr
    done = run_module(*again, "--rounds", "1", "--json", "new.json", folder=tmp_path)
    # So few iterations may take any time; what is sent is the same.
    assert done.returncode in (0, 1), done.stderr
    assert ("no regression" in done.stdout) == (done.returncode == 0)
    new = json.loads((tmp_path / "new.json").read_text())
    assert [len(system["rounds"]) for system in new["systems"].values()] == [1, 1]
    old = json.loads((tmp_path / "old.json").read_text())
    assert new["systems"][sized]["counts"] == old["systems"][sized]["counts"]
    assert set(new["systems"][sized]["counts"]) == {"bytes", "messages"}


@pytest.mark.nightly
@pytest.mark.slow
def test_several_batch_sizes_are_recorded_for_the_burst_planner(tmp_path: Path) -> None:
    options = ["--model", "resnet", "--batch", "2,1", "--systems", "ddp", *QUICK]
    files = ["--json", "out.json", "--record", "mine.json"]
    done = run_module("bytesched", "bench", *options, *files, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    graph = load_graph([str(tmp_path / "mine.json")], fixed_share=0.2)
    assert (graph.name, graph.batch, graph.assumed) == ("resnet", 2, "")
    layers = list(layers_of(graph.chain))
    result = json.loads((tmp_path / "out.json").read_text())
    assert sum(layer.parameter_bytes for layer in layers) == result["compute"]["model_bytes"]
    assert {tuple(size for size, _ in layer.forward.points) for layer in layers} == {(1, 2)}
    # 32 channels of 32 x 32 float32 from the first layer to the second.
    assert layers[0].output_bytes == 4 * 32 * 32 * 32


def test_a_failing_rank_ends_the_bench_and_is_quoted(tmp_path: Path) -> None:
    (tmp_path / "broken_model.py").write_text(BROKEN_MODEL)
    done = run_module(
        "bytesched", "bench", "--model", "broken_model:make", "--systems", "ddp", folder=tmp_path
    )
    assert done.returncode == 1
    assert "failed with exit code 1" in done.stderr
    assert "no such batch" in done.stderr


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, bench.TERMINATED), (signal.SIGINT, INTERRUPTED)]
)
@pytest.mark.one_in(2)
def test_when_it_is_stopped_its_table_stays_and_nothing_else(
    number: signal.Signals, code: int, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    command = [warm_python(), "-m", "bytesched", "bench", "--emulate", tiny, *QUICK]
    command += ["--json", str(tmp_path / "out.json")]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    with process.stdout as lines:
        assert lines.readline().startswith("estimate: 0.1 min, for ")
        for system in ("bytesched", "ddp", "fsdp2"):
            assert lines.readline().split()[:3] == ["round", "1/2", system]
        # By then, what the rounds before have found is written.
        assert lines.readline().startswith("bucket sweep")
        process.send_signal(number)
        rest = lines.read()
        assert process.wait(timeout=100) == code
    assert "stopped before the end; what was measured until then:" in rest
    rows = {line.split()[0]: line for line in rest.splitlines() if line.endswith("identical")}
    assert {"ddp", "bytesched"} <= set(rows)
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["stopped"]
    assert set(result["systems"]) == {"ddp", "fsdp2", "bytesched"}
    assert not list((tmp_path / "tmp").glob("bytesched-*"))


def test_under_torchrun(tiny: str, tmp_path: Path) -> None:
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    system = ["--systems", "ddp", "--json", "out.json"]
    done = run_module(
        *launcher, "bytesched", "bench", "--emulate", tiny, *QUICK, *system, folder=tmp_path
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["world_size"] == 2
    assert result["network"] == "ranks started by torchrun"
    assert done.stdout.count("tiny (emulated compute)") == 1


@pytest.mark.nightly
@pytest.mark.slow
def test_the_demo(tmp_path: Path) -> None:
    done = run_module("bytesched.plugins.demo", "--steps", "10", "--output", "out", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert [its["losses"] for its in result["systems"].values()] == ["identical"] * 3
    for system in ("ddp", "bytesched"):
        (trace,) = read_traces(tmp_path / "out" / system / "rank0.trace.json")
        assert trace.spans.keys() >= {"forward", "backward", "send", "update"}
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "out" / "iteration.png").stat().st_size > 10_000
