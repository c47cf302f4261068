"""What a session may expect of its ranks, whatever they reduce with (see backend.Backend)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from backends import BACKENDS, Ranks
from together import together

from bytesched.errors import SchedulerTimeout, TransportError
from bytesched.plugins.routes.backend import from_leader
from bytesched.tunable import KNOBS


@pytest.fixture(params=sorted(BACKENDS))
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    made = BACKENDS[request.param]()
    yield made
    together(lambda rank: made.backends[rank].close(), len(made.backends))
    made.close()


def test_ranks_know_their_places_and_what_can_change(ranks: Ranks) -> None:
    for rank, backend in enumerate(ranks.backends):
        assert (backend.rank, backend.size) == (rank, len(ranks.backends))
        assert backend.divisor in (1, backend.size)
        assert backend.timeout_s > 0
        assert backend.levels in (1, 2)
        assert backend.wire
        assert backend.knobs <= set(KNOBS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64], ids=str)
def test_sums_under_way_at_once_are_made_in_place(ranks: Ranks, dtype: torch.dtype) -> None:
    def on(rank: int) -> list[list[float]]:
        backend = ranks.backends[rank]
        tensors = [torch.arange(n, dtype=dtype) + 10 * rank for n in (1, 5, 64)]
        works = [backend.sum(tensor, f"sum {n}") for n, tensor in enumerate(tensors)]
        for n, work in enumerate(works):
            backend.wait(work, task=f"sum {n}")
        return [tensor.tolist() for tensor in tensors]

    size = len(ranks.backends)
    first = 10 * sum(range(size))
    expected = [[size * index + first for index in range(n)] for n in (1, 5, 64)]
    assert together(on, size) == [expected] * size


def test_all_have_what_rank_0_passed(ranks: Ranks) -> None:
    def on(rank: int) -> list[int]:
        values = [rank + 3, -(1 << 40) - rank]
        return from_leader(ranks.backends[rank], values, torch.device("cpu"), "values")

    size = len(ranks.backends)
    assert together(on, size) == [[3, -(1 << 40)]] * size


def test_a_timeout_names_the_rank_and_tells_the_story(ranks: Ranks) -> None:
    for backend in ranks.backends:
        error = backend.timeout("waited for nothing", lambda: "first\nsecond")
        assert isinstance(error, SchedulerTimeout)
        assert error.rank == backend.rank
        assert error.story == ("first", "second")
        assert "waited for nothing" in str(error)


def test_where_one_rank_gives_up_what_is_under_way_fails_on_all(ranks: Ranks) -> None:
    """And what they begin afterwards."""
    *others, last = ranks.backends

    def on(rank: int) -> None:
        backend = others[rank]
        work = backend.sum(torch.ones(4), "sum")
        with pytest.raises(TransportError):
            backend.wait(work, task="sum")
        # As a session does: a rank that is connected with this one alone learns of it.
        backend.abort()

    last.leave_note("the reason")
    last.abort()
    last.abort()
    together(on, len(others))
    for backend in ranks.backends:
        with pytest.raises((TransportError, RuntimeError)):
            backend.wait(backend.sum(torch.ones(4), "next"), task="next")
