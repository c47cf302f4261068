"""How ranks come to split their all-reduces together, and what becomes of a vote that fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from bytesched.errors import PeerLost
from bytesched.plugins.queries.operations import NORMS
from bytesched.plugins.queries.splitting import Splitting
from bytesched.tunable import Setting


class Ranks:
    """All but this one ask for norms; or they are gone."""

    rank, size = 0, 2

    def __init__(self, *, are_gone: bool = False) -> None:
        self.are_gone = are_gone
        self.sums: list[str] = []

    def sum(self, tensor: torch.Tensor, key: str) -> object:
        self.sums.append(key)
        tensor += 1
        return key

    def wait(self, work: object, *, task: str = "") -> None:
        if self.are_gone:
            raise PeerLost("rank 1 is gone", peers=[1])


def splitting(ranks: Ranks, failed: list[BaseException]) -> tuple[Splitting, Any]:
    slot = SimpleNamespace(
        view=torch.zeros(1), use_queries=lambda queries: handlers.append(queries)
    )
    handlers: list[Any] = []
    parts: Any = SimpleNamespace(plan=SimpleNamespace(slots=[slot]), carrier="whole")

    def raise_first(error: BaseException) -> NoReturn:
        failed.append(error)
        raise error

    context: Any = SimpleNamespace(backend=ranks, progress=SimpleNamespace(raise_first=raise_first))
    splitter: Any = None
    setting = Setting(partition_bytes=16, credit_bytes=16)
    made = Splitting(splitter, parts, context, setting, mode="auto", reduced=lambda _: None)
    return made, handlers[0]


def test_a_vote_that_fails_ends_the_session_so_that_others_learn_of_it() -> None:
    failed: list[BaseException] = []
    voting, _ = splitting(Ranks(are_gone=True), failed)
    voting.carrier()
    voting.begin_round()
    with pytest.raises(PeerLost) as raised:
        voting.carrier()
    assert failed == [raised.value]


def test_whoever_never_asks_for_norms_votes_for_whole_ones() -> None:
    ranks = Ranks()
    failed: list[BaseException] = []
    voting, queries = splitting(ranks, failed)
    for _ in range(9):
        assert str(voting.carrier()) == "whole"
        voting.begin_round()
        assert queries(torch.Tensor.add, (), {}) is NotImplemented
    assert ranks.sums == ["split or whole"] * 4
    assert torch.Tensor.norm in NORMS
    assert not failed
