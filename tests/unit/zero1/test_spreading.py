"""What owners send after a step: what is expected, what is sent, and who hears of its end."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from laid_out import parameters, plan_of

from bytesched.plugins.layout.plan import Ownership
from bytesched.plugins.routes.split.turns import Sent
from bytesched.plugins.zero1.shards import OwnedShards
from bytesched.plugins.zero1.spreading import Spreading
from bytesched.round import Round
from bytesched.task import CommTask


class Rank:
    """Rank 0 of two: it owns the first parameter, and rank 1 the second, unless it is said."""

    def __init__(self, owners: Sequence[int] = (0, 1)) -> None:
        self.plan = plan_of(parameters((8,), (6,)))
        self.plan.cut(1 << 20, Ownership(2, owners=owners))
        self.own, self.foreign = self.plan.slots
        self.log: list[tuple[Any, ...]] = []
        self.staged = {chunk.index: torch.zeros(8) for chunk in self.plan.chunks}
        self.notified = 0
        progress: Any = SimpleNamespace(
            lock=threading.RLock(), round=Round(self.plan.slots), notify=self._notify
        )
        plan = self.plan
        progress.round.cut(plan.chunks, plan.slots_of, plan.bundles, plan.bundles_of)
        self.under_way = progress.round.under_way
        updater: Any = SimpleNamespace(push=lambda bundles: self.log.append(("push", bundles)))
        self.spreading = Spreading(self.plan, progress, OwnedShards(self.plan, 0), self, updater)

    def _notify(self) -> None:
        self.notified += 1

    def arm(
        self, turn: int, leaving: Sequence[CommTask], coming: Mapping[CommTask, Sequence[slice]]
    ) -> None:
        self.log.append(("arm", turn, leaving, coming))

    def expect(self, chunks: Iterable[CommTask], sent: Sent) -> None:
        self.log.append(("expect", list(chunks), sent))

    def stage(self, chunk: CommTask, turn: int) -> torch.Tensor:
        return self.staged[chunk.index]

    def spread(self, chunk: CommTask, turn: int) -> None:
        self.log.append(("spread", chunk, turn))


def test_chunks_are_updated_here_or_elsewhere() -> None:
    rank = Rank()
    slots = rank.plan.slots
    assert rank.spreading.owned_chunks(slots) == rank.own.chunks
    assert rank.spreading.foreign_chunks(slots) == rank.foreign.chunks


def test_what_is_armed_is_under_way_until_it_has_left_and_come() -> None:
    rank = Rank()
    (mine,), (others,) = rank.own.chunks, rank.foreign.chunks
    for turn in (1, 2):
        assert rank.spreading.arm([rank.own], [rank.foreign]) == [others]
        assert rank.spreading.turn == turn
        assert rank.log == [("arm", turn, [mine], {others: [slice(0, 6)]})]
        rank.log.clear()
        assert rank.under_way.comes([others])
        assert not rank.under_way.comes([mine])
        rank.spreading.spread(mine)
        assert not rank.under_way.is_empty
        rank.spreading.gathered(others)
        assert rank.under_way.is_empty
        assert rank.log.pop() == ("push", [])
        assert rank.notified == 2 * turn


def test_chunks_are_expected_of_their_owners() -> None:
    rank = Rank()
    rank.spreading.expect(rank.foreign.chunks, Sent.PARAMETERS)
    assert rank.log == [("expect", rank.foreign.chunks, Sent.PARAMETERS)]


def test_a_parameter_is_staged_as_it_is_when_it_is_updated() -> None:
    rank = Rank()
    (chunk,) = rank.own.chunks
    rank.spreading.arm([rank.own], [])
    rank.log.clear()
    assert rank.spreading.stage([rank.own, rank.foreign], 1) == [chunk]
    with torch.no_grad():
        rank.own.parameter.zero_()
    assert rank.staged[chunk.index].tolist() == list(range(8))
    rank.spreading.send(chunk, 1)
    assert rank.log == [("spread", chunk, 1)]


def test_of_a_chunk_with_several_parameters_each_is_staged_in_its_place() -> None:
    rank = Rank(owners=(0, 0))
    (chunk,) = rank.own.chunks
    rank.staged[chunk.index] = torch.full((14,), -1.0)
    rank.spreading.stage([rank.foreign], 1)
    assert rank.staged[chunk.index].tolist() == [-1.0] * 8 + list(range(8, 14))
    rank.spreading.stage([rank.own], 1)
    assert rank.staged[chunk.index].tolist() == list(range(14))


def test_gradients_are_sent_in_the_turn_that_was_armed_last() -> None:
    rank = Rank()
    (chunk,) = rank.own.chunks
    rank.spreading.arm([rank.own], [])
    rank.spreading.send_gradients(chunk, lambda slice_: torch.full((8,), 7.0))
    assert rank.staged[chunk.index].tolist() == [7.0] * 8
    assert rank.log == [("arm", 1, [chunk], {}), ("spread", chunk, 1)]


def test_a_turn_that_is_staged_first_waits_for_what_an_earlier_one_sends_of_a_chunk() -> None:
    rank = Rank()
    (chunk,) = rank.own.chunks
    for _ in range(3):
        rank.spreading.arm([rank.own], [])
    rank.log.clear()
    rank.spreading.send(chunk, 3)
    rank.spreading.send(chunk, 2)
    assert rank.log == []
    rank.spreading.send(chunk, 1)
    for turn in (1, 2, 3):
        assert rank.log == [("spread", chunk, number) for number in range(1, turn + 1)]
        rank.spreading.spread(chunk)
    assert rank.under_way.is_empty


def test_of_a_chunk_that_comes_only_what_a_step_takes_is_put_in_place() -> None:
    rank = Rank(owners=(1, 1))
    (chunk,) = rank.foreign.chunks
    first, second = rank.plan.slots
    for slots, parts in (
        ([first], [slice(0, 8)]),
        ([second], [slice(8, 14)]),
        ([first, second], [slice(0, 14)]),
    ):
        rank.spreading.arm([], slots)
        assert rank.log.pop()[3] == {chunk: parts}
