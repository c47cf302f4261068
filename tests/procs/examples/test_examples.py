"""The examples, run as a user runs them: plainly, and through `bytesched run`.

Once for each launcher, at night, in interpreters that import everything; the others are forked from
one that has imported torch.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from horovod_launched import LAUNCHERS, LOOPBACK_FLAGS, Kind, why_missing
from paths import ROOT, SUPPORT
from ranks import HOROVOD
from warm_python import warm_python

from bytesched.environment import child_environment

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
RUN = ["-m", "bytesched", "run"]
TIMEOUT_S = 250.0

# Makes plain DDP end reliably.
PLAIN_TORCH = str(SUPPORT / "plain_torch")

pytestmark = pytest.mark.procs


@pytest.fixture
def python() -> str:
    return warm_python()


def output(command: Sequence[str], **variables: str) -> list[str]:
    """The lines that a command printed, with no errors."""
    environment = {
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env=child_environment({**environment, **variables}),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    if "run" in command:
        assert re.search(r"2 ranks, .* mode cross", ended.stderr), ended.stderr
    return ended.stdout.splitlines()


def plain_output(command: Sequence[str], **variables: str) -> list[str]:
    path = os.pathsep.join(filter(None, [PLAIN_TORCH, os.environ.get("PYTHONPATH")]))
    return output(command, PYTHONPATH=path, **variables)


def losses(script: Sequence[str], *options: str) -> list[float]:
    lines = "\n".join(output([*script, *options]))
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", lines)]


def weights(lines: list[str]) -> str:
    """The digest of the weights, which rank 0 prints at its end."""
    (digest,) = [line.partition("weights ")[2] for line in lines if "weights " in line]
    assert re.fullmatch("[0-9a-f]{16}", digest)
    return digest


@pytest.mark.nightly
@pytest.mark.parametrize(("ranks", "gate"), [(2, "dts"), (4, "top2")])
def test_a_mixture_of_experts_has_equal_losses_with_and_without_the_lane(
    ranks: int, gate: str, python: str
) -> None:
    torchrun = [*TORCHRUN[:-1], f"--nproc-per-node={ranks}"]
    script = [python, *torchrun, "examples/moe_gpt.py", "--steps", "6", "--gate", gate]
    script += ["--expert-ranks", "2", "--batch", "2"]
    plain = losses(script, "--plain")
    assert len(plain) == 1
    # Where buckets and chunks are cut decides in which order Gloo sums four ranks.
    expected = plain if ranks == 2 else pytest.approx(plain, rel=1e-5)
    assert losses(script) == expected
    assert losses(script, "--no-lane") == expected


@pytest.mark.nightly
def test_a_graph_has_equal_losses_with_and_without_wrap(python: str) -> None:
    script = [python, *TORCHRUN, "examples/gcn_halo.py", "--vertices", "300", "--epochs", "12"]
    plain = losses(script, "--plain")
    assert len(plain) == 2
    assert plain[0] > plain[1]
    assert losses(script) == plain


@pytest.mark.parametrize("is_warm", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_ddp_has_the_loss_of_plain_ddp_and_crosses_the_barrier(python: str, is_warm: bool) -> None:
    plain = plain_output([python, *TORCHRUN, "examples/ddp.py"], BYTESCHED_ENABLED="0")
    command = [python if is_warm else sys.executable, *TORCHRUN, "examples/ddp.py"]
    ours = output(command, BYTESCHED_GUARD="0")
    assert plain[0].startswith("loss ")
    assert plain[0] == ours[0]
    figures = dict(line[2:].split(" = ") for line in ours[1:])
    assert figures["mode"] == "cross"
    assert int(figures["barrier_crossed_steps"]) > 10
    assert plain[1:] == ["  mode = plain"]


@pytest.mark.nightly
def test_burst_train_learns(python: str) -> None:
    lines = output([python, *TORCHRUN, "examples/burst_train.py"])
    first, last = re.fullmatch(r"loss (\S+) -> (\S+)", lines[0]).groups()  # type: ignore[union-attr]
    assert float(last) < float(first)
    assert lines[1].startswith("background steps ")


@pytest.mark.nightly
@pytest.mark.slow
def test_ddp_checkpoint_goes_on_as_if_it_had_not_been_interrupted(
    python: str, tmp_path: Path
) -> None:
    script = ["examples/ddp_checkpoint.py", "--epochs"]
    plain, ours = ([f"--snapshot={tmp_path / name}"] for name in ("plain.pt", "ours.pt"))
    expected = plain_output([python, *TORCHRUN, *script, "2", *plain])
    half = output([python, *TORCHRUN, *RUN, *script, "1", *ours])
    whole = output([python, *TORCHRUN, *RUN, *script, "2", *ours])
    assert weights(whole) == weights(expected) != weights(half)
    assert half[:1] + whole[:1] == expected[:2]


@pytest.mark.nightly
@pytest.mark.slow
def test_ddp_spawn(python: str) -> None:
    expected = plain_output([python, "examples/ddp_spawn.py"])
    assert weights(output([python, *RUN, "examples/ddp_spawn.py"])) == weights(expected)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.needs("horovod")
@pytest.mark.parametrize("kind", ["gloo", "mpi"])
def test_horovod_mnist(kind: Kind) -> None:
    if reason := why_missing(kind):
        pytest.skip(reason)
    launcher = [LAUNCHERS[kind], *LOOPBACK_FLAGS[kind], "-np", "2"]
    python = warm_python(*HOROVOD)
    script = ["examples/horovod_mnist.py", "--epochs=1", "--fp16-allreduce"]
    expected = output([*launcher, python, *script])
    ours = output([*launcher, sys.executable if kind == "gloo" else python, *RUN, *script])
    assert weights(ours) == weights(expected)


@pytest.mark.nightly
def test_wave_ticktock_has_the_loss_of_accumulation(python: str) -> None:
    waves = output([python, "examples/wave_ticktock.py"])
    accumulated = output([python, "examples/wave_ticktock.py", "--accumulate"])
    assert waves[0].startswith("loss ")
    assert waves[0] == accumulated[0]
    assert "  waves = 2" in waves


@pytest.mark.nightly
def test_wave_model_parallel(python: str) -> None:
    lines = output([python, *TORCHRUN, "examples/wave_model_parallel.py"])
    assert re.fullmatch(r"loss \d\.\d{10}, 34 tensors to save", lines[0])
    figures = dict(line[2:].split(" = ") for line in lines[1:])
    assert figures["world_size"] == "2"
    assert int(figures["home_bytes"]) < int(figures["model_bytes"])
