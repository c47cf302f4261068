"""The order of what a session queues on streams, over a device whose work ends late."""

from __future__ import annotations

import pytest
import torch
from ranks import Ranks
from streams_scripts import (
    Event,
    broken_device,
    late_and_immediate_weights,
    over_a_fake_gpu,
    recorded,
    recorded_with_tensor_lr,
)

Recorded = tuple[list[Event], dict[str, list[int]], int]

#: event -> the state in which a chunk must be for it, and the one that it leads to
CHUNK = {
    "backward_done": ("complete", "queued"),
    "computed": ("queued", "computed"),
    "communication": ("computed", "sending"),
    "complete": ("sending", "complete"),
}


@pytest.fixture(scope="module")
def runs(two_ranks: Ranks) -> list[Recorded]:
    return two_ranks.run(recorded)


def replay(log: list[Event], chunks: dict[str, list[int]]) -> int:
    """Checks every event against the ones before it; returns how many updates there were."""
    state: dict[int, str] = {}
    stepped: set[int] = set()
    unread: set[str] = set()
    updates = 0
    for place, (what, whom) in enumerate(log):
        where = f"{what} {whom} at {place}"
        if what in CHUNK:
            needed, following = CHUNK[what]
            assert state.get(whom, "complete") == needed, f"{where}, which is {state.get(whom)}"
            state[whom] = following
        if what == "backward_done":
            stepped.discard(whom)
            stale = [name for name in unread if whom in chunks[name]]
            assert not stale, f"{where}: no stream waited for the update of {stale}"
        elif what == "stepped":
            stepped |= state.keys()
        elif what == "updated":
            assert whom, f"{where}: nothing was updated"
            updates += len(whom)
            unread |= set(whom)
            for name in whom:
                for chunk in chunks[name]:
                    assert state[chunk] == "complete", f"{where}: chunk {chunk} is {state[chunk]}"
                    assert chunk in stepped, f"{where}: step() was not called"
        elif what == "read":
            unread.clear()
    return updates


def test_order_of_every_chunk_and_update(runs: list[Recorded]) -> None:
    """Queued, computed, sent, complete; stepped; updated; read; and only then queued again."""
    for log, chunks, crossed in runs:
        assert crossed > 2
        assert replay(log, chunks) > 2 * len(chunks)


def test_every_round_notes_every_gradient_and_begins_with_the_forward(
    runs: list[Recorded],
) -> None:
    for log, chunks, _ in runs:
        kinds = [what for what, _ in log]
        rounds = kinds.count("begin")
        assert kinds.count("gradient") == rounds * len(chunks)
        assert kinds.index("begin") < kinds.index("gradient")
        assert kinds.count("lend") == kinds.count("stepped")


def test_all_ranks_send_in_one_order(runs: list[Recorded]) -> None:
    first, second = ([whom for what, whom in log if what == "communication"] for log, _, _ in runs)
    assert first == second


def test_nothing_happens_after_the_streams_are_closed(runs: list[Recorded]) -> None:
    for log, _, _ in runs:
        assert log[-1] == ("close", None)


def test_tensors_among_hyperparameters_are_lent_to_the_update(two_ranks: Ranks) -> None:
    for log in two_ranks.run(recorded_with_tensor_lr):
        lent = [count for what, count in log if what == "lend"]
        assert lent
        assert set(lent) == {1}


def test_late_streams_change_no_bit(two_ranks: Ranks) -> None:
    for late, immediate in two_ranks.run(late_and_immediate_weights):
        assert all(map(torch.equal, late, immediate))


def test_an_error_of_the_device_reaches_the_user(two_ranks: Ranks) -> None:
    for error, left in two_ranks.run(broken_device):
        assert "the device has failed" in error
        assert not left


def test_world_of_one(one_rank: Ranks) -> None:
    """The way in for NCCL, which takes no two ranks on one device."""
    ((log, chunks, crossed),) = one_rank.run(recorded)
    assert crossed > 2
    assert replay(log, chunks) > 2 * len(chunks)


def test_training_over_a_fake_gpu_keeps_the_order(two_ranks: Ranks) -> None:
    """Gradient made, chunk sent; used, updated; updated, used again."""
    for wrong, checks, all_updated in two_ranks.run(over_a_fake_gpu):
        assert not wrong
        assert checks > 50
        assert all_updated
