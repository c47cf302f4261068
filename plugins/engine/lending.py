"""Rest: gradients and steps are the framework's for a while, where communication takes no time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import perf_counter_ns
from typing import Final, NoReturn

from bytesched.config import Config
from bytesched.errors import BytesschedError
from bytesched.task import CommTask
from bytesched.tunable import Setting

from ..dependency.context import Context, PlanParts
from ..dependency.lazy import leave
from ..proxies.entries import watch_backward
from ..queries.splitting import Splitting
from ..routes.handover import Borrower, Handover, Hooks
from .lookout import Lookout
from .resting import Alternation, Report
from .rounds import interrupted, left_out
from .telling import Telling

__all__ = ["Arrivals", "Lending", "alternation_for"]

log = logging.getLogger("bytesched")

_TOLD: Final = "whether to rest"


class Arrivals:
    """Notes when the last gradient came, on its way to ``then``."""

    def __init__(self, then: Callable[[CommTask], None]) -> None:
        self._then = then
        self.last_ns = 0

    def reduced(self, chunk: CommTask) -> None:
        """The sum of ``chunk`` is in the arena. A thread of the carrier."""
        # First: afterwards the next round may begin.
        self.last_ns = perf_counter_ns()
        self._then(chunk)


def alternation_for(config: Config) -> Alternation | None:
    """What decides when a session with these settings rests; None: it never does.

    What is tuned, sharded or always split cannot, and sizes that are given hold in every round.
    """
    is_fixed = config.tune or config.shard or config.split == "on" or config.partition_bytes
    return None if is_fixed else Alternation()


class Lending:
    """Lends gradients and takes them back, on all ranks before the same round.

    Args:
        alternation: decides when.
        arrivals: of the gradients of scheduled rounds.
        takeover: whose gradients are; with a borrower.
        splitting: of scheduled rounds, if they can be split.
        setting: with the size of chunks, which is that of the borrower's buckets.
    """

    def __init__(
        self,
        alternation: Alternation,
        arrivals: Arrivals,
        parts: PlanParts,
        handover: Handover,
        context: Context,
        *,
        splitting: Splitting | None,
        setting: Setting,
    ) -> None:
        assert handover.borrower is not None
        assert handover.hooks is not None
        self._borrower: Borrower = handover.borrower
        self._hooks: Hooks = handover.hooks
        self._handover = handover
        self._alternation = alternation
        self._arrivals = arrivals
        self._parts = parts
        self._slots = parts.plan.slots
        self._progress = context.progress
        self._meter = context.meter
        self._observers = context.observers
        self._rank = context.backend.rank
        self._splitting = splitting
        self._setting = setting
        self._telling = Telling(context, _TOLD)
        self._has_said = False
        #: a round is complete, and none has begun since
        self._is_between = False
        #: an exception has ended a backward pass of a rested round
        self._is_interrupted = False
        #: rested rounds that were seen to be over
        self._seen = 0
        #: when the current round began, and when the last backward pass ended
        self._began_ns = self._backward_ns = 0
        #: while gradients are lent
        self._lookout: Lookout | None = None
        self._end_watch: Callable[[], None] = _nothing
        handover.check = self._check

    @property
    def is_lent(self) -> bool:
        """Whether gradients are lent at the moment."""
        return self._handover.is_lent

    # -- scheduled rounds --------------------------------------------------------------

    def round_begins(self) -> None:
        """A scheduled round begins, and nothing of the last one is on the wire."""
        now_ns = perf_counter_ns()
        if self._is_between:
            self._round_over(now_ns, max(0, self._arrivals.last_ns - self._backward_ns))
            if self._alternation.is_over and not self._telling.is_under_way:
                self._telling.tell(self._report())
        self._began_ns = now_ns
        self._is_between = False

    def round_complete(self) -> None:
        """Every gradient of a scheduled round is there."""
        self._backward_ns = perf_counter_ns()
        self._is_between = True

    # -- forward -----------------------------------------------------------------------

    def before_forward(self) -> None:
        """A forward pass begins; the first one after each round is the same moment on all ranks."""
        if self.is_lent:
            self._before_rested()
        elif self._is_between and self._telling.is_under_way:
            self._decide(self._telling.hear())

    def _before_rested(self) -> None:
        self._check()
        try:
            self._borrower.prepare()
        except BytesschedError as error:
            self._fail(error)
        if self._hooks.counted == self._seen:
            return
        self._seen = self._hooks.counted
        self._meter.rested()
        now_ns = perf_counter_ns()
        self._round_over(now_ns, 0)
        self._began_ns = now_ns
        if self._alternation.is_over:
            self._telling.tell(self._report())
            self._decide(self._telling.hear())

    def _round_over(self, now_ns: int, exposed_ns: int) -> None:
        self._alternation.round_over((now_ns - self._began_ns) // 1000, exposed_ns // 1000)

    def _report(self) -> list[int]:
        # Whoever watches a session wants to see what it schedules.
        may_rest = not self._observers
        return self._alternation.report(may_rest=may_rest).numbers()

    def _decide(self, reports: list[list[int]]) -> None:
        self._alternation.decide([Report.of(numbers) for numbers in reports])
        if self._alternation.is_resting is not self.is_lent:
            if self.is_lent:
                self._take_back()
            else:
                self._lend()
            # What it takes to change is no part of a round.
            self._began_ns = perf_counter_ns()
            self._is_between = False
        if self._splitting is not None and not self.is_lent and not self._alternation.is_look:
            self._splitting.resume()

    # -- change ------------------------------------------------------------------------

    def _lend(self) -> None:
        self._parts.synchronizing.wait_reduced()
        self._parts.synchronizing.synchronize_all()
        # Every rank has come to the end of its last step, in which it may have asked others.
        self._telling.tell([self._rank])
        self._telling.hear()
        if self._splitting is not None:
            self._splitting.pause()
        for slot in self._slots:
            # The arena is used again while the script may still have this one.
            leave(slot)
        self._handover.off = self._handover.is_lent = True
        self._hooks.count(self._slots[0])
        self._seen = self._hooks.counted
        parameters = [slot.parameter for slot in self._slots]
        self._borrower.borrow(parameters, self._setting.partition_bytes)
        self._lookout = Lookout(self._borrower.lost, self._progress.fail)
        self._end_watch = watch_backward(self)
        if self._rank == 0 and not self._has_said:
            log.info(
                "communication takes no time here: gradients are left to the framework's own "
                "reduction, in chunks of this size, and scheduled again now and then"
            )
        self._has_said = True

    def _take_back(self) -> None:
        self._give_up()
        self._hooks.put_on()
        self._handover.off = False

    def _give_up(self) -> None:
        self._handover.is_lent = False
        self._end_watch()
        self._end_watch = _nothing
        if self._lookout is not None:
            self._lookout.close()
            self._lookout = None
        self._borrower.give_back()

    # -- rested backward passes (see entries.BackwardWatch) ------------------------------

    def backward_begins(self) -> None:
        if self._lookout is not None:
            self._lookout.backward_begins()

    def backward_ends(self) -> None:
        if self._lookout is not None:
            self._lookout.backward_ends()

    def backward_failed(self, error: BaseException) -> None:
        named = self._borrower.named(error)
        if named is not None:
            # If it was broken from here, there is an earlier error.
            self._progress.fail(named, is_raised=True)
            raise (self._progress.error or named) from error
        self._is_interrupted = self._borrower.missing() is not None

    def _check(self) -> None:
        """Raises unless the gradients of the last rested round are complete."""
        if not self.is_lent:
            return
        self._progress.check()
        if self._is_interrupted:
            self._fail(interrupted(self._rank))
        if (missing := self._borrower.missing()) is not None:
            names = [self._slots[at].name for at in missing if at < len(self._slots)]
            names = names or [s.name for s in self._slots if s.parameter.grad is None]
            self._fail(left_out(names, self._rank))

    def _fail(self, error: BaseException) -> NoReturn:
        self._progress.fail(error, is_raised=True)
        raise error

    # -- the end -----------------------------------------------------------------------

    def disown(self) -> None:
        """In a forked child: nothing is reduced there."""
        self._give_up()

    def close(self) -> None:
        """Gradients are lent to nobody. Idempotent."""
        self._telling.close()
        self._give_up()


def _nothing() -> None:
    pass
