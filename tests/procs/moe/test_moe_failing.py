"""One rank of a mixture of experts raises, stands still or dies: the others are told, and when."""

from __future__ import annotations

import signal

import pytest
from moe_failing import fails_before_it_reduces, raises_in_one_row, raises_on_one_rank
from ranks import Ranks, run_fresh

pytestmark = pytest.mark.procs


@pytest.mark.parametrize(
    ("kind", "error_type"),
    [
        ("first expert", ValueError),
        ("last expert", ValueError),
        ("last expert", KeyboardInterrupt),
        ("gate", ValueError),
    ],
)
def test_an_error_on_one_rank_is_told_to_the_others_which_go_on(
    kind: str, error_type: type[BaseException], four_ranks: Ranks
) -> None:
    *others, last = four_ranks.run(raises_on_one_rank, kind, error_type)
    assert last == ["its own", "no error", 0]
    what = "the gate" if kind == "gate" else "experts"
    for found, *rest in others:
        assert isinstance(found, str)
        assert found.startswith("PeerLost: "), found
        assert f"rank 3 said: {what} of layer " in found, found
        assert f" raised {error_type.__name__}: the weather" in found, found
        assert rest == ["no error", 0]


def test_an_error_in_one_row_of_a_grid_stays_in_it(four_ranks: Ranks) -> None:
    *first_row, (third,), (last,) = four_ranks.run(raises_in_one_row)
    assert first_row == [["no error"], ["no error"]]
    assert third.startswith("PeerLost: rank 3 is gone"), third
    # By its number in the job, as everywhere.
    assert "rank 3 said: experts of layer " in third, third
    assert last == "its own"


@pytest.mark.parametrize(
    ("number", "limit_s", "expected"),
    [
        (signal.SIGSTOP, 4, "SchedulerTimeout: no progress within 4 s: "),
        (signal.SIGKILL, 100, "PeerLost: rank 3 is gone"),
    ],
)
def test_sums_of_expert_gradients_end_at_the_limit_of_exchanges(
    number: int, limit_s: int, expected: str
) -> None:
    """The process group's own limit is 30 s, and a stopped rank is ended by the one that waits."""
    limit = {"BYTESCHED_TIMEOUT_S": str(limit_s)}
    first, second, third, last = run_fresh(
        fails_before_it_reduces, world_size=4, timeout_s=25, env=limit, args=(number,)
    )
    assert last.code == -9
    assert second.code == 0, second.stderr
    assert second.stdout.startswith(expected), second.stdout
    assert "task gradients of experts over ranks 1, 3, seen by rank 1" in second.stdout
    for other in (first, third):
        assert (other.code, other.stdout) == (0, "no error\n"), other.stderr
