"""MXNet's parameter server: real schedulers, servers and workers, in a Python of their own."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
from mxnet_cluster import ROOT, Cluster, find_python

from bytesched.config import child_environment

PYTHON, WHY_NOT = find_python()

pytestmark = [pytest.mark.procs, pytest.mark.skipif(not PYTHON, reason=WHY_NOT)]


def answers(case: str, *arguments: str, servers: int = 1) -> list[dict[str, Any]]:
    """What both workers say, by rank."""
    with Cluster(PYTHON, case, *arguments, servers=servers) as cluster:
        ended = cluster.wait()
    assert [worker.code for worker in ended] == [0, 0], "\n".join(one.output for one in ended)
    lines = [line for one in ended for line in one.output.splitlines() if line.startswith("{")]
    return sorted(map(json.loads, lines), key=lambda said: said["rank"])


@pytest.mark.slow
@pytest.mark.parametrize(("updates", "optimizer"), [("worker", "adam"), ("server", "sgd")])
def test_training_has_the_weights_and_losses_of_plain_mxnet(updates: str, optimizer: str) -> None:
    plain = answers("training", "plain", updates, optimizer)
    assert plain[0]["weights"] == plain[1]["weights"]
    assert answers("training", "trainer", updates, optimizer) == plain
    assert answers("training", "store", updates, optimizer, servers=2) == plain


def example(**variables: str) -> list[str]:
    """The lines that the example prints."""
    ended = subprocess.run(
        [PYTHON, ROOT / "examples" / "kvstore_mxnet.py"],
        env=child_environment({"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def test_the_example_has_the_losses_of_plain_mxnet() -> None:
    plain, ours = example(BYTESCHED_ENABLED="0"), example()
    assert [line for line in ours if "loss" in line] == plain[:-1]
    assert plain[-1] == "  mode = plain"
    assert "  mode = kvstore" in ours


@pytest.mark.parametrize("servers", [1, 2])
def test_calls(servers: int) -> None:
    answers("calls", servers=servers)


def test_misuse_is_named() -> None:
    answers("misuse")


def test_urgent_keys_overtake() -> None:
    for said in answers("order", "priority"):
        first, _, *others = map(int, said["order"])
        # The second one is what was there when the first one had ended.
        assert first == 0
        assert len(others) == 6
        assert others == sorted(others, reverse=True)


def test_fifo_keeps_the_order_of_the_calls() -> None:
    for said in answers("order", "fifo"):
        assert said["order"] == list(map(str, range(8)))


def test_a_trainer_sends_first_what_backward_computed_last() -> None:
    answers("learned_order")


def test_readers_wait_for_the_pull() -> None:
    answers("weight_waits")


def test_workers_with_different_orders_do_not_wait_for_ever() -> None:
    answers("different_orders")


def test_a_lost_server_is_an_error_within_the_timeout() -> None:
    with Cluster(PYTHON, "server_lost") as cluster:
        for worker in cluster.workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "training\n"
        cluster.servers[0].kill()
        ended = cluster.wait(30.0)
    for worker in ended:
        assert worker.code is not None, "it did not end by itself"
        assert "raised the servers have not answered for 2 s on key 0" in worker.output
