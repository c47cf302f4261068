"""The carriers of split sums: hops by messages or collectives, and answers beside them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch

from bytesched.errors import BytesschedError
from bytesched.task import CommTask
from bytesched.tunable import Setting

from ..queries.answers import Answers
from ..queries.expressions import Asked
from ..queries.gradient_queries import GradientQueries
from ..routes.carrier import Traffic
from ..routes.groups.group import Group
from ..routes.split.turns import Sent
from ..zero1.lockstep import Place
from ..zero1.requests import Requests
from ..zero1.spreading import SpreadCarrier

__all__ = ["ExchangeCarrier", "Parameters", "ShardedCarrier", "ShardedExchange", "SplitExchange"]


class SplitExchange(Protocol):
    """One rank's part in the two hops of every chunk, by messages or by collectives."""

    @property
    def order(self) -> str:
        """How the ranks come to one order, for ``stats()``."""

    @property
    def traffic(self) -> Traffic:
        """What has been carried so far."""

    @property
    def is_summed(self) -> bool:
        """Whether the sums of this round that this rank measures are in the arena."""

    def begin_round(self) -> None:
        """A new backward pass begins, and nothing is under way. Raises an error of ours."""

    def submit(self, chunk: CommTask) -> None:
        """The gradients of ``chunk``, which is READY, are there."""

    def lost(self) -> BaseException | None:
        """The error of something that is waited for and cannot come, if there is one."""

    def story(self) -> str:
        """The last events, for the message of an error."""

    def close(self) -> None:
        """Ends threads; what is under way fails. Idempotent."""


class ShardedExchange(SplitExchange, Protocol):
    """The first hop of every chunk, where owners update what they have summed."""

    @property
    def may_tell(self) -> bool:
        """Whether any rank measures what others own; the same on all ranks."""

    def tell_measurers(self, tells: bool) -> None:
        """From the round on that begins next, owners send their sums to who measures them."""

    def is_told(self, chunks: Iterable[CommTask]) -> bool:
        """Whether the sums of this round that others own of ``chunks`` come in phase one."""

    def close(self, *, is_idle: bool = True) -> None:
        """Ends threads; with ``is_idle``, what shares them has nothing under way."""


class Parameters(SpreadCarrier, Protocol):
    """The second hop of a sharded update."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""

    def begin_round(self) -> None:
        """A new backward pass begins."""

    def close(self) -> None:
        """Wakes who waits for memory. Idempotent."""


class ExchangeCarrier:
    """See splitting.SplitCarrier.

    Args:
        answers: to what is asked of gradients, which no chunk on the wire holds up.
        groups: of both; only this carrier uses them.
        failed: called with an error that is raised in the user's thread.
        closed: called with each group when nothing of it is used any more.
    """

    def __init__(
        self,
        exchange: SplitExchange,
        answers: Answers,
        queries: GradientQueries,
        groups: Sequence[Group],
        *,
        failed: Callable[[BaseException], None],
        closed: Callable[[Group], None],
    ) -> None:
        self._exchange = exchange
        self._failed = failed
        self._answers = answers
        self.queries = queries
        self._groups = groups
        self._give_back = closed
        self._closed = False

    @property
    def order(self) -> str:
        return self._exchange.order

    @property
    def traffic(self) -> Traffic:
        return self._exchange.traffic

    @property
    def asked(self) -> Asked:
        return self.queries.asked

    def begin_round(self) -> None:
        try:
            self._exchange.begin_round()
        except BytesschedError as error:
            # The other ranks learn of it, as they take part in it.
            self._failed(error)
            raise
        self.queries.begin_round()

    def backward_ends(self) -> None:
        self.queries.backward_ends()

    def lost(self) -> BaseException | None:
        return self._exchange.lost() or self._answers.lost()

    def submit(self, chunk: CommTask) -> None:
        self._exchange.submit(chunk)

    def change(self, setting: Setting) -> None:
        """Sizes are those of the cut; a window per rank takes the place of credit."""

    def story(self) -> str:
        return self._exchange.story()

    def end_round(self) -> None:
        self._answers.end_round()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        # Without it others would wait for more; after an error they do not.
        with contextlib.suppress(BytesschedError):
            self._answers.end_round()
        self._close_exchange()
        self._answers.close()
        for group in self._groups:
            self._give_back(group)

    def _close_exchange(self) -> None:
        self._exchange.close()


class ShardedCarrier(ExchangeCarrier):
    """See sharding.ShardedCarrier."""

    def __init__(
        self,
        exchange: ShardedExchange,
        parameters: Parameters,
        answers: Answers,
        requests: Requests,
        queries: GradientQueries,
        groups: Sequence[Group],
        *,
        failed: Callable[[BaseException], None],
        closed: Callable[[Group], None],
    ) -> None:
        super().__init__(exchange, answers, queries, groups, failed=failed, closed=closed)
        self._sums = exchange
        self._parameters = parameters
        self._requests = requests

    def lost(self) -> BaseException | None:
        return super().lost() or self._requests.lost()

    def begin_round(self) -> None:
        super().begin_round()
        self._parameters.begin_round()

    def arm(
        self, turn: int, leaving: Sequence[CommTask], coming: Mapping[CommTask, Sequence[slice]]
    ) -> None:
        self._parameters.arm(turn, leaving, coming)

    def expect(self, chunks: Iterable[CommTask], sent: Sent) -> None:
        self._parameters.expect(chunks, sent)

    def stage(self, chunk: CommTask, turn: int) -> torch.Tensor:
        return self._parameters.stage(chunk, turn)

    def spread(self, chunk: CommTask, turn: int) -> None:
        self._parameters.spread(chunk, turn)

    @property
    def may_tell(self) -> bool:
        return self._sums.may_tell

    def tell_measurers(self, tells: bool) -> None:
        self._sums.tell_measurers(tells)

    @property
    def measured_whole(self) -> bool:
        return self.queries.measured_whole

    def ask(self, questions: Mapping[int, bytes], *, task: str) -> Iterator[tuple[int, bytes]]:
        return self._requests.ask(questions, task=task)

    def answer(self, rank: int, answer: bytes) -> None:
        self._requests.answer(rank, answer)

    def announce(self, place: Place, is_last: bool) -> None:
        self._requests.announce(place, is_last)

    def leave(self, limit_s: float) -> list[int]:
        return self._requests.wait_ended(limit_s)

    def close(self) -> None:
        self._requests.close()
        super().close()

    def _close_exchange(self) -> None:
        self._parameters.close()
        self._sums.close(is_idle=self._parameters.is_idle)
