"""What a session may expect of what carries its chunks (see carrier.Carrier)."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from backends import BACKENDS, TIMEOUT_S, Ranks
from laid_out import parameters, plan_of
from together import together

from bytesched.errors import SchedulerClosed, TransportError
from bytesched.observe import Observers
from bytesched.plugins.layout.packing import Packer
from bytesched.plugins.routes.backend import Backend
from bytesched.plugins.routes.streams import Streams
from bytesched.task import CommTask, TaskState
from bytesched.tunable import Setting

SIZES = (40, 300, 64, 7)
SETTING = Setting(partition_bytes=256, credit_bytes=512)


class Rank:
    """One rank: its plan and carrier, and what was reported."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.plan = plan_of(parameters(*((n,) for n in SIZES)))
        self.plan.cut(SETTING.partition_bytes)
        self.packer = Packer(self.plan, backend.divisor, "none")
        self.reduced: list[CommTask] = []
        self.states: list[TaskState] = []
        self.errors: list[BaseException] = []
        self._changed = threading.Condition()
        self.carrier = backend.carrier(
            self.plan,
            self.packer,
            Streams(),
            SETTING,
            reduced=self._reduced,
            failed=self._failed,
            observers=Observers(),
        )

    def _reduced(self, chunk: CommTask) -> None:
        with self._changed:
            self.reduced.append(chunk)
            self.states.append(chunk.state)
            self._changed.notify_all()

    def _failed(self, error: BaseException) -> None:
        with self._changed:
            self.errors.append(error)
            self._changed.notify_all()
        # As a session does: the others learn of it.
        self.backend.abort()

    def fill(self, number: int) -> None:
        """Gradients of a round, which differ on all ranks."""
        for position, slot in enumerate(self.plan.slots):
            slot.parameter.grad = gradient(self.backend.rank, number, position)
            assert slot.take_gradient()

    def submit(self, chunk: CommTask) -> None:
        while not chunk.notify_ready():
            pass
        self.carrier.submit(chunk)

    def round(self, number: int) -> list[torch.Tensor]:
        """What is in the arena when every chunk was reported."""
        self.fill(number)
        before = len(self.reduced)
        chunks = self.plan.chunks
        for chunk in random.Random(7 * number + self.backend.rank).sample(chunks, len(chunks)):
            self.submit(chunk)
        with self._changed:
            assert self._changed.wait_for(
                lambda: self.errors or len(self.reduced) - before == len(chunks), TIMEOUT_S
            ), self.carrier.story()
        assert not self.errors
        return [slot.view.clone() for slot in self.plan.slots]

    def wait_failed(self) -> BaseException:
        with self._changed:
            assert self._changed.wait_for(lambda: self.errors, TIMEOUT_S)
        return self.errors[0]


def a_round(found: list[Rank], number: int, rank: int) -> list[torch.Tensor]:
    return found[rank].round(number)


def gradient(rank: int, number: int, position: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 100 * number + position)
    # Whole numbers: their mean over two or four ranks is exact in every order.
    return torch.randint(-99, 99, (SIZES[position],), generator=generator).float()


@pytest.fixture(params=sorted(BACKENDS))
def found(request: pytest.FixtureRequest) -> Iterator[list[Rank]]:
    ranks: Ranks = BACKENDS[request.param]()
    made = together(lambda rank: Rank(ranks.backends[rank]), len(ranks.backends))
    yield made
    together(lambda rank: made[rank].carrier.close(), len(made))
    together(lambda rank: ranks.backends[rank].close(), len(made))
    ranks.close()


def test_every_round_has_its_sums_in_the_arena_whatever_order_chunks_come_in(
    found: list[Rank],
) -> None:
    size = len(found)
    for number in range(3):
        views = together(partial(a_round, found, number), size)
        for position, made in enumerate(zip(*views, strict=True)):
            total = torch.stack([gradient(r, number, position) for r in range(size)]).sum(0)
            for view in made:
                assert torch.equal(view, total / found[0].backend.divisor)
    for rank in found:
        chunks = rank.plan.chunks
        assert sorted(chunk.index for chunk in rank.reduced) == sorted(
            [chunk.index for chunk in chunks] * 3
        )
        # They wait for the gradients of the next round by then.
        assert set(rank.states) == {TaskState.WAITING}
        assert not any(slice_.grad is not None for of in rank.plan.slices for slice_ in of)
        traffic = rank.carrier.traffic
        assert (traffic.chunks, traffic.nbytes) == (3 * len(chunks), 3 * rank.plan.nbytes)
        assert traffic.busy_ns > 0
        assert rank.carrier.order
        assert rank.carrier.story()


def test_a_rank_that_gives_up_fails_the_carriers_of_all_once(found: list[Rank]) -> None:
    *others, last = found
    for rank in others:
        rank.fill(0)
        for chunk in rank.plan.chunks:
            rank.submit(chunk)
    last.backend.abort()
    for rank in others:
        assert isinstance(rank.wait_failed(), TransportError)
    together(lambda rank: found[rank].carrier.close(), len(found))
    assert [len(rank.errors) for rank in others] == [1] * len(others)


def test_closed_it_takes_no_chunk(found: list[Rank]) -> None:
    for rank in found:
        rank.carrier.close()
        rank.carrier.close()
        rank.fill(0)
        with contextlib.suppress(SchedulerClosed):
            rank.submit(rank.plan.chunks[0])
    assert not any(rank.reduced for rank in found)
