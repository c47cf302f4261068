"""The pools and fresh runs that every Horovod test stands on."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from ranks import RankFailure

if TYPE_CHECKING:
    from horovod_launched import Kind
    from ranks import Ranks

Pools = Callable[[int], "Ranks"]
pytestmark = [pytest.mark.procs, pytest.mark.nightly]


@pytest.fixture(params=["gloo", pytest.param("mpi", marks=pytest.mark.slow)])
def kind(request: pytest.FixtureRequest) -> Kind:
    kind: Kind = request.param
    return kind


@pytest.fixture
def pools(kind: Kind, request: pytest.FixtureRequest) -> Pools:
    pools: Pools = request.getfixturevalue(f"hvd_{kind}")
    return pools


def summed(value: float) -> tuple[int, int, float, int]:
    import horovod.torch as hvd
    import torch

    total = hvd.allreduce(torch.tensor([value * (hvd.rank() + 1)]), op=hvd.Sum, name="summed")
    return hvd.rank(), hvd.size(), total.item(), os.getpid()


def controllers() -> tuple[bool, bool]:
    import horovod.torch as hvd

    return hvd.gloo_enabled(), hvd.mpi_enabled()


def stuck_on_rank_1() -> None:
    import horovod.torch as hvd

    if hvd.rank() == 1:
        time.sleep(600)


def raises_on_rank_0_dies_on_rank_1() -> None:
    import horovod.torch as hvd

    if hvd.rank() == 0:
        raise ArithmeticError("boom")
    print("last words", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def ends_by(rank_0: int, rank_1: int) -> None:
    import horovod.torch as hvd

    print("variable", os.environ.get("HOROVOD_CACHE_CAPACITY"))
    hvd.barrier()
    sys.exit([rank_0, rank_1][hvd.rank()])


def test_a_pool_serves_case_after_case(pools: Pools) -> None:
    first, second = pools(2).run(summed, 1.0), pools(2).run(summed, 2.0)
    assert [answer[:3] for answer in first] == [(0, 2, 3.0), (1, 2, 3.0)]
    assert [answer[:3] for answer in second] == [(0, 2, 6.0), (1, 2, 6.0)]
    assert [answer[3] for answer in first] == [answer[3] for answer in second]


def test_a_pool_runs_the_controller_it_is_named_after(pools: Pools, kind: Kind) -> None:
    assert pools(2).run(controllers) == [(kind == "gloo", kind == "mpi")] * 2


def test_a_failure_is_told_and_the_next_case_runs(pools: Pools) -> None:
    with pytest.raises(RankFailure) as failed:
        pools(2).run(raises_on_rank_0_dies_on_rank_1)
    rank_0, rank_1 = str(failed.value).split("--- rank 1")
    assert "ArithmeticError: boom" in rank_0
    assert rank_1.startswith("\ndied\n")
    assert "last words" in rank_1
    with pytest.raises(RankFailure) as failed:
        pools(2).run(stuck_on_rank_1, timeout_s=2.0)
    _, rank_1 = str(failed.value).split("--- rank 1")
    assert rank_1.startswith("\ndid not come back")
    assert "in stuck_on_rank_1" in rank_1
    assert [answer[0] for answer in pools(2).run(summed, 1.0)] == [0, 1]


def test_fresh_processes_tell_their_exit_codes(pools: Pools, kind: Kind) -> None:
    from horovod_launched import run_fresh_horovod

    ended = run_fresh_horovod(ends_by, kind, args=(0, 0), env={"HOROVOD_CACHE_CAPACITY": "7"})
    assert (ended.launcher.code, [rank.code for rank in ended.ranks]) == (0, [0, 0])
    assert [rank.stdout for rank in ended.ranks] == ["variable 7\n"] * 2
    failed = run_fresh_horovod(ends_by, kind, args=(0, 3))
    assert failed.launcher.code != 0
    assert failed.ranks[1].code == 3


def test_a_fresh_script_that_hangs_is_ended_with_its_stack(
    pools: Pools, kind: Kind, tmp_path: Path
) -> None:
    from horovod_launched import run_fresh_horovod

    script = tmp_path / "script.py"
    script.write_text("import sys, time\nprint(sys.argv[1], flush=True)\ntime.sleep(600)\n")
    ended = run_fresh_horovod(script, kind, timeout_s=6.0, args=("word",))
    assert [(rank.code, rank.stdout) for rank in ended.ranks] == [(-9, "word\n")] * 2
    assert all('script.py", line 3' in rank.stderr for rank in ended.ranks)
    assert ended.launcher.code != 0
