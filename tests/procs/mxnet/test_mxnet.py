"""MXNet's parameter server: real schedulers, servers and workers, in a Python of their own."""

from __future__ import annotations

import json
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from builds import python_with
from mxnet_cluster import Cluster
from paths import ROOT, SCRIPTS

from bytesched.environment import child_environment

#: what one cluster can do after another; each starts several processes
CASES = (
    *("calls", "misuse", "order:priority", "order:fifo", "learned_order", "weight_waits"),
    "keys_that_are_not_used",
)


def answers(*cases: str, servers: int = 1) -> dict[str, list[dict[str, Any]]]:
    """What both workers say, by case and rank."""
    with Cluster(*cases, servers=servers) as cluster:
        ended = cluster.wait()
    assert [worker.code for worker in ended] == [0, 0], "\n".join(one.output for one in ended)
    lines = [line for one in ended for line in one.output.splitlines() if line.startswith("{")]
    said = sorted(map(json.loads, lines), key=lambda answer: int(answer["rank"]))
    return {case: [answer for answer in said if answer["case"] == case] for case in cases}


@pytest.fixture(scope="module")
def said() -> dict[str, list[dict[str, Any]]]:
    return answers(*CASES, "different_orders")


def printed(*command: str | Path, **variables: str) -> str:
    done = subprocess.run(
        [python_with("mxnet"), *command],
        env=child_environment({"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}),
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@cache
def alone(updates: str, optimizer: str) -> dict[str, Any]:
    """What the same training comes to in one process."""
    case = f"training:alone:{updates}:{optimizer}"
    answer: dict[str, Any] = json.loads(printed(SCRIPTS / "mxnet_cases.py", case))
    return answer


@pytest.mark.nightly
@pytest.mark.parametrize(("updates", "optimizer"), [("worker", "adam"), ("server", "sgd")])
@pytest.mark.parametrize(("how", "servers"), [("trainer", 1), ("store", 2)])
def test_training_is_that_of_one_process(
    how: str, servers: int, updates: str, optimizer: str
) -> None:
    expected = alone(updates, optimizer)
    case = f"training:{how}:{updates}:{optimizer}"
    for answer in answers(case, servers=servers)[case]:
        rank = str(answer["rank"])
        assert answer["weights"] == expected["weights"]
        assert answer["losses"] == {rank: expected["losses"][rank]}


@pytest.mark.nightly
def test_the_example_has_the_losses_of_plain_mxnet() -> None:
    script = ROOT / "examples" / "kvstore_mxnet.py"
    plain = printed(script, BYTESCHED_ENABLED="0").splitlines()
    ours = printed(script).splitlines()
    assert [line for line in ours if "loss" in line] == plain[:-1]
    assert plain[-1] == "  mode = plain"
    assert "  mode = kvstore" in ours


@pytest.mark.parametrize(
    "case", ["calls", "misuse", "learned_order", "weight_waits", "keys_that_are_not_used"]
)
def test_case(said: dict[str, list[dict[str, Any]]], case: str) -> None:
    assert [answer["rank"] for answer in said[case]] == [0, 1]


@pytest.mark.nightly
def test_calls_with_two_servers() -> None:
    answers("calls", "different_orders", servers=2)


@pytest.mark.nightly
@pytest.mark.parametrize("workers", ["01", "0"])
def test_an_optimizer_for_whole_keys_may_be_set_after_init(workers: str) -> None:
    case = f"optimizer_after_init:{workers}"
    assert len(answers(case)[case]) == 2


def test_urgent_keys_overtake_on_all_workers_as_worker_0_wants(
    said: dict[str, list[dict[str, Any]]],
) -> None:
    for answer in said["order:priority"]:
        first, _, *others = answer["order"]
        # The second one is what was there when the first one had ended.
        assert first == 0
        assert len(others) == 6
        assert others == sorted(others, reverse=True)


def test_fifo_keeps_the_order_of_the_calls(said: dict[str, list[dict[str, Any]]]) -> None:
    for answer in said["order:fifo"]:
        assert answer["order"] == list(range(8))


def test_workers_with_different_orders_do_not_wait_for_ever(
    said: dict[str, list[dict[str, Any]]],
) -> None:
    assert len(said["different_orders"]) == 2


@pytest.mark.parametrize(
    ("when", "limit_s", "said"),
    [
        ("training", 30.0, "the servers have not answered for 2 s on key 0"),
        # MXNet makes keys behind a barrier of its own, which has no limit.
        pytest.param(
            *("made", 60.0, "waited 2 s in the start of the store"), marks=pytest.mark.nightly
        ),
    ],
)
def test_a_lost_server_is_an_error_within_the_timeout(when: str, limit_s: float, said: str) -> None:
    with Cluster(f"server_lost:{when}") as cluster:
        for worker in cluster.workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == f"{when}\n"
        cluster.servers[0].kill()
        for worker in cluster.workers:
            assert worker.stdin is not None
            worker.stdin.write("\n")
            worker.stdin.flush()
        ended = cluster.wait(limit_s)
    for one in ended:
        assert one.code is not None, "it did not end by itself"
        assert f"raised {said}" in one.output
