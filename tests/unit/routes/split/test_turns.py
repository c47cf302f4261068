"""Turns: one after the other, as long as all ranks come to the same."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import pytest
from connected import connected
from together import together

from bytesched.errors import MismatchError
from bytesched.plugins.routes.split.turns import Sent, Turns

_LIMIT_S = 60.0


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_goes_when_those_before_it_have_gone(ranks: int) -> None:
    groups = connected(ranks)

    def one(rank: int) -> list[int]:
        gone: list[int] = []
        failed: list[BaseException] = []
        ended = threading.Event()
        turns = Turns(groups[rank], failed.append)
        for number in range(6):
            if number % 2:
                turns.begin_round(partial(gone.append, number))
            else:
                # In whatever order a rank lists them.
                indices = [number, 7] if rank else [7, number]
                turns.agree(Sent.PARAMETERS, indices, partial(gone.append, number))
        turns.begin_round(ended.set)
        assert ended.wait(_LIMIT_S)
        assert turns.is_idle
        turns.close()
        assert not failed
        return gone

    assert together(one, ranks) == [list(range(6))] * ranks


def _in_another_round(turns: Turns, rank: int) -> None:
    for _ in range(1 + rank):
        turns.begin_round(lambda: None)
    turns.agree(Sent.PARAMETERS, [1, 2], lambda: None)


@pytest.mark.parametrize(
    ("come_to", "why"),
    [
        (
            lambda turns, rank: turns.agree(Sent.PARAMETERS, [1, 2 + rank], lambda: None),
            "a step was left out",
        ),
        (
            lambda turns, rank: turns.agree(Sent(rank), [1, 2], lambda: None),
            "others gradients that no step() has taken",
        ),
        (_in_another_round, "ranks are 1 backward pass apart"),
    ],
    ids=["chunks", "kind", "round"],
)
def test_nothing_goes_after_ranks_have_come_to_different_things(
    come_to: Callable[[Turns, int], None], why: str
) -> None:
    groups = connected(2)

    def one(rank: int) -> tuple[list[str], BaseException]:
        gone: list[str] = []
        failed: list[BaseException] = []
        is_told = threading.Event()

        def fail(error: BaseException) -> None:
            failed.append(error)
            is_told.set()

        turns = Turns(groups[rank], fail)
        turns.agree(Sent.GRADIENTS, [3], lambda: gone.append("before"))
        come_to(turns, rank)
        turns.begin_round(lambda: gone.append("after"))
        assert is_told.wait(_LIMIT_S)
        turns.close()
        (error,) = failed
        return gone, error

    for gone, error in together(one):
        assert gone == ["before"]
        assert isinstance(error, MismatchError)
        assert why in str(error)
