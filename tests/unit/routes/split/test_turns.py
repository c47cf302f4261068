"""Turns: one after the other, as long as all ranks come to the same."""

from __future__ import annotations

import threading
from functools import partial

import pytest
from connected import connected
from together import together

from bytesched.errors import MismatchError
from bytesched.plugins.routes.split.turns import Turns

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
                turns.then(partial(gone.append, number))
            else:
                # In whatever order a rank lists them.
                indices = [number, 7] if rank else [7, number]
                turns.agree(indices, partial(gone.append, number))
        turns.then(ended.set)
        assert ended.wait(_LIMIT_S)
        assert turns.is_idle
        turns.close()
        assert not failed
        return gone

    assert together(one, ranks) == [list(range(6))] * ranks


def test_nothing_goes_after_ranks_have_come_to_different_things() -> None:
    groups = connected(2)

    def one(rank: int) -> tuple[list[str], BaseException]:
        gone: list[str] = []
        failed: list[BaseException] = []
        is_told = threading.Event()

        def fail(error: BaseException) -> None:
            failed.append(error)
            is_told.set()

        turns = Turns(groups[rank], fail)
        turns.then(lambda: gone.append("before"))
        turns.agree([1, 2 + rank], lambda: gone.append("differs"))
        turns.then(lambda: gone.append("after"))
        assert is_told.wait(_LIMIT_S)
        turns.close()
        (error,) = failed
        return gone, error

    for gone, error in together(one):
        assert gone == ["before"]
        assert isinstance(error, MismatchError)
