"""A script in a command line is found, whatever starts it, and runs under `bytesched run`."""

from __future__ import annotations

import pytest

from bytesched.tuning.launching import runs_bytesched, under_run

RUN = "-m bytesched run"


@pytest.mark.parametrize(
    "changed",
    [
        "torchrun --nproc-per-node 2 {} train.py --lr 1",
        "/a/torchrun --rdzv-id=x {} train.py other.py",
        "torchrun --nnodes 2 {} -m my.train -m x",
        "torchrun --no-python python -u {} train.py",
        "python {} train.py",
        "/v/bin/python3.12 -u -X dev -Walways {} train",
        "python {} -m my.train --x",
        "python -m torch.distributed.run {} train.py",
        "mpirun -np 2 python3 {} train.py",
        "env A=1 horovodrun -np 2 python {} a.py",
        "accelerate launch --multi_cpu {} t.py",
        "python /v/bin/torchrun --nnodes 2 {} t.py",
    ],
)
def test_a_script_is_found(changed: str) -> None:
    command = changed.replace("{} ", "").split()
    assert under_run(command) == changed.format(RUN).split()
    assert not runs_bytesched(command)
    assert runs_bytesched(changed.format(RUN).split())


def test_the_long_name_of_the_option_is_known() -> None:
    assert under_run(["torchrun", "--module", "x"]) == ["torchrun", *RUN.split(), "-m", "x"]


@pytest.mark.parametrize(
    "command",
    ["bash train.sh", "./train", "python -c pass", "python -", "python", "python -u", "torchrun",
     "torchrun -m --nnodes 2 x", "torchrun -m", "mpirun -np 2 ./train.py",
     "accelerate launch --no_python ./train.sh --main train.py", "deepspeed train.py",
     "python -m torch.distributed.launch train.py"],
)  # fmt: skip
def test_where_there_is_none_nothing_is_changed(command: str) -> None:
    assert under_run(command.split()) is None


@pytest.mark.parametrize(
    "command",
    [
        "bytesched bench",
        "mpirun -np 2 bytesched run t.py",
        "python -m bytesched bench",
        "python -m bytesched.plugins.demo",
    ],
)
def test_what_is_bytesched_already_is_known(command: str) -> None:
    assert runs_bytesched(command.split())
