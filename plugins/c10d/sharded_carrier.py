"""The carrier of a sharded update: hops by messages or collectives, and answers beside them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from bytesched.errors import BytesschedError
from bytesched.task import CommTask
from bytesched.tunable import Setting

from ..queries.answers import Answers
from ..queries.gradient_queries import GradientQueries
from ..routes.carrier import Traffic
from ..routes.groups.group import Group
from ..zero1.requests import Requests
from ..zero1.spreading import SpreadCarrier

__all__ = ["Parameters", "ShardedCarrier", "ShardedExchange"]


class ShardedExchange(Protocol):
    """One rank's part in the first hop of every chunk, by messages or by collectives."""

    @property
    def order(self) -> str:
        """How the ranks come to one order, for ``stats()``."""

    @property
    def traffic(self) -> Traffic:
        """What has been carried so far."""

    @property
    def is_summed(self) -> bool:
        """Whether the sums of this round that this rank owns are in the arena."""

    def begin_round(self) -> None:
        """A new backward pass begins, and nothing is under way. Raises an error of ours."""

    def submit(self, chunk: CommTask) -> None:
        """The gradients of ``chunk``, which is READY, are there."""

    def lost(self) -> BaseException | None:
        """The error of something that is waited for and cannot come, if there is one."""

    def story(self) -> str:
        """The last events, for the message of an error."""

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


class ShardedCarrier:
    """See sharding.ShardedCarrier.

    Args:
        answers: to what is asked of gradients, which no chunk on the wire holds up.
        groups: of all; only this carrier uses them.
        failed: called with an error that is raised in the user's thread.
        closed: called with each group when nothing of it is used any more.
    """

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
        self._exchange = exchange
        self._parameters = parameters
        self._answers = answers
        self._requests = requests
        self.queries = queries
        self._groups = groups
        self._failed = failed
        self._give_back = closed
        self._closed = False
        self.arm = parameters.arm
        self.expect = parameters.expect
        self.stage = parameters.stage
        self.spread = parameters.spread
        self.answer = requests.answer
        self.announce = requests.announce
        self.leave = requests.wait_ended
        self.submit = exchange.submit
        self.story = exchange.story
        self.end_round = answers.end_round
        self.backward_ends = queries.backward_ends

    @property
    def order(self) -> str:
        return self._exchange.order

    @property
    def traffic(self) -> Traffic:
        return self._exchange.traffic

    def begin_round(self) -> None:
        try:
            self._exchange.begin_round()
        except BytesschedError as error:
            # The other ranks learn of it, as they take part in it.
            self._failed(error)
            raise
        self.queries.begin_round()
        self._parameters.begin_round()

    def lost(self) -> BaseException | None:
        return self._exchange.lost() or self._answers.lost() or self._requests.lost()

    def change(self, setting: Setting) -> None:
        """Sizes are those of the cut; a window per rank takes the place of credit."""

    def ask(self, questions: Mapping[int, bytes], *, task: str) -> Iterator[tuple[int, bytes]]:
        return self._requests.ask(questions, task=task)

    def close(self) -> None:
        self._requests.close()
        if self._closed:
            return
        self._closed = True
        # Without it others would wait for more; after an error they do not.
        with contextlib.suppress(BytesschedError):
            self._answers.end_round()
        self._parameters.close()
        self._exchange.close(is_idle=self._parameters.is_idle)
        self._answers.close()
        for group in self._groups:
            self._give_back(group)
