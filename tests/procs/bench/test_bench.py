"""Small whole runs of the bench, and of the demo."""

from __future__ import annotations

import importlib.util
import signal
import subprocess

import pytest
from small_benches import QUICK, Bench, losses
from torch.nn.parallel import DistributedDataParallel
from warm_python import warm_python

from bytesched.bench.profile import load_profile
from bytesched.bench.systems import SYSTEMS
from bytesched.burst.graph import layers_of, load_graph
from bytesched.cli import INTERRUPTED
from bytesched.commands.bench import TERMINATED
from bytesched.trace.reading import read_traces

BROKEN_MODEL = """
import torch
def make():
    def loss(module, seed):
        raise RuntimeError("no such batch")
    return torch.nn.Linear(2, 2), loss
"""


def test_all_systems_on_two_ranks(bench: Bench) -> None:
    systems = ["ddp:timeline=runs", *SYSTEMS[1:]]
    options = ["--systems", ",".join(systems), "--record", "recorded.json"]
    result = bench.result("--emulate", "tiny.json", *QUICK, *options)
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
    files = [str(bench.folder / name) for name in ("recorded.json", "tiny.json")]
    assert len({load_profile(file).nbytes for file in files}) == 1
    assert "bytesched" in result["stdout"]
    for rank in range(2):
        (trace,) = read_traces(bench.folder / "runs" / f"rank{rank}.trace.json")
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
def test_forms_of_ddp_train_the_same(clip: list[str], bench: Bench) -> None:
    result = bench.result("--emulate", "tiny.json", *QUICK, "--systems", ",".join(PEERS), *clip)
    assert losses(result) == dict.fromkeys(PEERS, "identical")


@pytest.mark.nightly
def test_the_same_is_measured_again_and_compared(bench: Bench) -> None:
    sized = "bytesched:partition_bytes=64KiB+credit_bytes=128KiB"
    old = bench.result("--emulate", "tiny.json", "--systems", f"ddp,{sized}", *QUICK)
    refused = bench.run("--compare", "out.json", "--clip", "1")
    assert refused.returncode == 2
    assert "another setting: clip was 0.0 and is 1.0 now" in refused.stderr
    done = bench.run("--compare", "out.json", "--rounds", "1", "--json", "new.json")
    # So few iterations may take any time; what is sent is the same.
    assert done.returncode in (0, 1), done.stderr
    assert ("no regression" in done.stdout) == (done.returncode == 0)
    new = bench.read("new.json")
    assert [len(system["rounds"]) for system in new["systems"].values()] == [1, 1]
    assert new["systems"][sized]["counts"] == old["systems"][sized]["counts"]
    assert set(new["systems"][sized]["counts"]) == {"bytes", "messages"}


@pytest.mark.nightly
@pytest.mark.slow
def test_several_batch_sizes_are_recorded_for_the_burst_planner(bench: Bench) -> None:
    options = ["--model", "resnet", "--batch", "2,1", "--systems", "ddp", *QUICK]
    result = bench.result(*options, "--record", "mine.json")
    graph = load_graph([str(bench.folder / "mine.json")])
    assert (graph.name, graph.batch, graph.assumed) == ("resnet", 2, "")
    layers = list(layers_of(graph.chain))
    assert sum(layer.parameter_bytes for layer in layers) == result["compute"]["model_bytes"]
    assert {tuple(size for size, _ in layer.forward.points) for layer in layers} == {(1, 2)}
    # 32 channels of 32 x 32 float32 from the first layer to the second.
    assert layers[0].output_bytes == 4 * 32 * 32 * 32


def test_a_failing_rank_ends_the_bench_and_is_quoted(bench: Bench) -> None:
    (bench.folder / "broken_model.py").write_text(BROKEN_MODEL)
    done = bench.run("--model", "broken_model:make", "--systems", "ddp")
    assert done.returncode == 1
    assert "failed with exit code 1" in done.stderr
    assert "no such batch" in done.stderr


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, TERMINATED), (signal.SIGINT, INTERRUPTED)]
)
@pytest.mark.one_in(2)
def test_when_it_is_stopped_its_table_stays_and_nothing_else(
    number: signal.Signals, code: int, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(bench.folder / "tmp"))
    (bench.folder / "tmp").mkdir()
    command = [warm_python(), "-m", "bytesched", "bench", "--emulate", "tiny.json", *QUICK]
    process = subprocess.Popen(
        [*command, "--json", "out.json"],
        cwd=bench.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
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
    result = bench.read("out.json")
    assert result["stopped"]
    assert set(result["systems"]) == {"ddp", "fsdp2", "bytesched"}
    assert not list((bench.folder / "tmp").glob("bytesched-*"))


def test_under_torchrun(bench: Bench) -> None:
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    program = [*launcher, "bytesched", "bench"]
    result = bench.result("--emulate", "tiny.json", *QUICK, "--systems", "ddp", program=program)
    assert result["world_size"] == 2
    assert result["network"] == "ranks started by torchrun"
    assert result["stdout"].count("tiny (emulated compute)") == 1


@pytest.mark.nightly
@pytest.mark.slow
def test_the_demo(bench: Bench) -> None:
    done = bench.run("--steps", "10", "--output", "out", program=["bytesched.plugins.demo"])
    assert done.returncode == 0, done.stderr
    assert [*losses(bench.read("out/result.json")).values()] == ["identical"] * 3
    for system in ("ddp", "bytesched"):
        (trace,) = read_traces(bench.folder / "out" / system / "rank0.trace.json")
        assert trace.spans.keys() >= {"forward", "backward", "send", "update"}
    if importlib.util.find_spec("matplotlib"):
        assert (bench.folder / "out" / "iteration.png").stat().st_size > 10_000
