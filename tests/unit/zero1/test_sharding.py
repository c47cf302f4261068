"""The parts of a sharded session, joined: what its carrier is told, asks and hears, and when."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from laid_out import parameters, plan_of
from looped import TIMEOUT_S

from bytesched.errors import BytesschedError, MismatchError, PeerLost, TransportError
from bytesched.observe import Observers
from bytesched.plugins.dependency.progress import Progress
from bytesched.plugins.figures.meter import Meter
from bytesched.plugins.layout.packing import Packer
from bytesched.plugins.layout.plan import Ownership
from bytesched.plugins.routes.streams import Streams
from bytesched.plugins.zero1.lockstep import Place
from bytesched.plugins.zero1.rank_calls import packed, unpacked
from bytesched.plugins.zero1.sharding import Dealing, Sharding
from bytesched.round import GradientState, Memory
from bytesched.tunable import Setting

#: as many rounds as have votes, and some more


class Rank:
    """Rank 0 of two, whose carrier notes what it is told; the other one votes as it does."""

    def __init__(self) -> None:
        self.log = Mock()
        self.rank, self.size, self.timeout_s = 0, 2, TIMEOUT_S
        self.answers: dict[int, Any] = {}
        self.changed = threading.Condition()
        self.plan = plan_of(parameters((8,), (6,)))
        self.packer = Packer(self.plan, 2, "bf16")
        self.progress = Progress(self, self.plan.slots)  # type: ignore[arg-type]
        self.carrier = self.log.carrier
        self.carrier.answer = self._answer
        self.carrier.leave.return_value = []
        streams = Mock(wraps=Streams())
        self.log.attach_mock(streams.settle, "settle")
        context: Any = SimpleNamespace(
            progress=self.progress,
            streams=streams,
            backend=self,
            meter=Meter(Observers(), 2),
            observers=Observers(),
        )
        self.setting = Setting(1 << 20, 1 << 20)
        sharder: Any = SimpleNamespace(cut=self._cut, carrier=self._make)
        self.sharding = Sharding(
            sharder,
            self.plan,
            self.packer,
            context,
            self.setting,
            Mock(),
            Dealing([0, 3], [True, False]),
            reduced=self.log.reduced,
        )
        self.progress.round.cut(
            self.plan.chunks, self.plan.slots_of, self.plan.bundles, self.plan.bundles_of
        )
        for slot in self.plan.slots:
            slot.make_lazy(lambda: None)

    # -- the ranks ---------------------------------------------------------------------

    def sum(self, tensor: torch.Tensor, key: str) -> str:
        self.log.sum(key)
        return key

    def wait(self, work: Any, *, task: str = "") -> None:
        assert work == task

    def leave_note(self, text: str) -> None:
        pass

    def abort(self) -> None:
        self.log.abort()

    # -- the sharder -------------------------------------------------------------------

    def _cut(self, plan: Any, partition_bytes: int, kinds: Any, may_cut: Any) -> None:
        self.log.cut(partition_bytes, kinds, may_cut)
        plan.cut(partition_bytes, Ownership(2, [0, 1], kinds))

    def _make(self, *args: Any, reduced: Callable[..., None], **others: Any) -> Any:
        self.listener = args[4]
        self.log.made(reduced)
        return self.carrier

    # -- what its carrier does ---------------------------------------------------------

    def _answer(self, rank: int, answer: bytes) -> None:
        with self.changed:
            try:
                self.answers[rank] = unpacked(answer)
            except BytesschedError as error:
                self.answers[rank] = error
            self.changed.notify_all()

    def answer_to(self, rank: int) -> Any:
        with self.changed:
            assert self.changed.wait_for(lambda: rank in self.answers, TIMEOUT_S)
            return self.answers.pop(rank)

    def round(self) -> Any:
        carrier = self.sharding.carrier()
        self.sharding.begin_round()
        self.sharding.backward_ends()
        return carrier


@pytest.fixture
def rank() -> Iterator[Rank]:
    found = Rank()
    yield found
    found.sharding.close()


def test_all_ranks_meet_then_the_plan_is_cut_and_what_carries_is_the_new_carrier(
    rank: Rank,
) -> None:
    names = [name for name, *_ in rank.log.mock_calls]
    assert names == ["sum", "cut", "made"]
    rank.log.cut.assert_called_once_with(1 << 20, [0, 3], [True, False])
    rank.log.made.assert_called_once_with(rank.log.reduced)
    assert rank.listener is rank.sharding
    first, second = rank.plan.slots
    assert rank.sharding.ownerships.own == {first: first}
    assert [share.rank for share in rank.sharding.ownerships.foreign[second]] == [1]
    # What is sent has the memory of the new chunks.
    for chunk in rank.plan.chunks:
        assert rank.packer.memory(chunk).shape == rank.plan.buffers[chunk.index].shape
    # The session asks the new carrier for gradients, for what has happened, and what was lost.
    assert all(slot.queries is rank.carrier.queries for slot in rank.plan.slots)
    rank.carrier.story.return_value = "a message left"
    assert rank.progress.story() == "a message left"
    rank.carrier.lost.return_value = PeerLost("rank 1 is gone")
    assert isinstance(rank.progress.look(), PeerLost)
    assert rank.sharding.traffic is rank.carrier.traffic


def test_each_round_is_announced_and_compared(rank: Rank) -> None:
    assert rank.round() is rank.carrier
    (announced,) = rank.carrier.announce.mock_calls
    place = announced.args[0]
    assert announced == call(Place(1, 2, 0, 0, 0), False)
    rank.listener.heard(1, place._replace(steps=1, taken=5), False)
    with pytest.raises(MismatchError, match="after 1 calls of step"):
        rank.progress.check()


def test_questions_of_other_ranks_are_answered_by_whom_they_are_for(rank: Rank) -> None:
    slot = rank.plan.slots[0]
    slot.view.copy_(torch.arange(8.0))
    rank.listener.asked(1, packed(("gradients", (1, [0]))))
    (value,) = rank.answer_to(1)
    assert value.tolist() == [*range(8)]
    # What is queued on other streams comes before the answer.
    assert rank.log.settle.called
    rank.listener.asked(2, packed(("state", (0, 0, 0))))
    rank.progress.fail(TransportError("the cable was cut"))
    error = rank.answer_to(2)
    assert isinstance(error, TransportError)
    assert "the cable was cut" in str(error)


@pytest.mark.parametrize("begins", [Sharding.waits_for_ranks, Sharding.forward_begins])
def test_no_answer_for_norms_is_owed_once_this_rank_goes_on(
    rank: Rank, begins: Callable[[Sharding], None]
) -> None:
    begins(rank.sharding)
    rank.carrier.end_round.assert_called_once_with()


def test_a_gradient_that_is_kept_is_completed_with_its_changes_if_it_is_here(rank: Rank) -> None:
    first, second = rank.plan.slots
    first.state = second.state = GradientState.SUMMED
    first.view.fill_(3.0)
    first.changes = [lambda views: torch._foreach_add_(views, 1)]
    second.memory = Memory.GONE
    second.changes = [lambda _: pytest.fail("it is not here")]
    for slot in (first, second):
        rank.sharding.complete_kept(slot)
    assert first.view.tolist() == [4.0] * 8
    assert not first.changes


def test_an_end_is_said_once_and_others_are_waited_for(
    rank: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    rank.carrier.leave.return_value = [1]
    rank.sharding.leave()
    rank.carrier.announce.assert_called_once_with(Place(0, 1, 0, 0, 0), True)
    rank.carrier.leave.assert_not_called()
    with caplog.at_level(logging.WARNING, "bytesched"):
        rank.sharding.close()
    rank.carrier.announce.assert_called_once()
    rank.carrier.leave.assert_called_once_with(TIMEOUT_S)
    assert caplog.messages == ["rank 0 ends before ranks [1]"]
    names = [name for name, *_ in rank.log.mock_calls]
    assert names.index("carrier.leave") < names.index("carrier.close")


def test_after_an_error_nobody_is_waited_for(rank: Rank) -> None:
    rank.progress.fail(TransportError("the cable was cut"))
    rank.sharding.close()
    for silent in (rank.carrier.announce, rank.carrier.leave, rank.carrier.end_round):
        silent.assert_not_called()
    rank.carrier.close.assert_called_once_with()
