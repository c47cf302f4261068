"""Splits what a session sends by exchanging slices over Gloo."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Final

from bytesched.errors import BytesschedError
from bytesched.observe import Observers
from bytesched.plugins.c10d.group import Group
from bytesched.plugins.c10d.sockets import short_queues
from bytesched.plugins.c10d.split.answers import Answers
from bytesched.plugins.c10d.split.desk import Desk
from bytesched.plugins.c10d.split.exchange import Exchange
from bytesched.plugins.c10d.split.owners import owners_of
from bytesched.plugins.layout.packing import Packer
from bytesched.plugins.layout.plan import Ownership, Plan
from bytesched.plugins.session.carrier import Traffic
from bytesched.plugins.session.meter import Meter
from bytesched.plugins.session.progress import Progress
from bytesched.task import CommTask
from bytesched.tunable import Setting

__all__ = ["ExchangeCarrier", "ExchangeSplitter"]

#: of one connection: enough for a link of 10 Gbit/s over 100 microseconds
_UNSENT_BYTES: Final = 128 << 10


class ExchangeSplitter:
    """See splitting.Splitter.

    Args:
        ranks: how many there are.
        open_group: opens a group of Gloo for a purpose; collective.
        close_group: closes it.
    """

    def __init__(
        self, ranks: int, open_group: Callable[[str], Group], close_group: Callable[[Group], None]
    ) -> None:
        self._ranks = ranks
        self._open_group = open_group
        self._close_group = close_group

    def cut(self, plan: Plan, partition_bytes: int) -> None:
        nbytes = [slot.view.nbytes for slot in plan.slots]
        owners = owners_of(nbytes, self._ranks, partition_bytes)
        plan.cut(partition_bytes, Ownership(self._ranks, owners))

    def carrier(
        self,
        plan: Plan,
        packer: Packer,
        progress: Progress,
        *,
        reduced: Callable[[CommTask], None],
        meter: Meter,
        observers: Observers,
    ) -> ExchangeCarrier:
        with short_queues(_UNSENT_BYTES):
            exchange = self._open_group("exchange")
        return ExchangeCarrier(
            exchange,
            self._open_group("answers"),
            plan,
            packer,
            progress,
            reduced=reduced,
            closed=self._close_group,
            meter=meter,
            observers=observers,
        )


class ExchangeCarrier:
    """See splitting.SplitCarrier.

    Args:
        group: for chunks; only this carrier uses it.
        answers: for what is asked of gradients, which no chunk on the wire holds up.
        closed: called with each group when nothing of it is used any more.
    """

    order = "exchange"

    def __init__(
        self,
        group: Group,
        answers: Group,
        plan: Plan,
        packer: Packer,
        progress: Progress,
        *,
        reduced: Callable[[CommTask], None],
        closed: Callable[[Group], None],
        meter: Meter,
        observers: Observers,
    ) -> None:
        self._groups = group, answers
        self._give_back = closed
        self._closed = False

        def notify() -> None:
            with progress.changed:
                progress.notify()

        self._exchange = Exchange(
            group,
            plan,
            packer,
            reduced=reduced,
            summed=notify,
            failed=progress.fail,
            observers=observers,
        )
        self._answers = Answers(answers, len(plan.slots), arrived=notify, failed=progress.fail)
        self.desk = Desk(plan, group.rank, self._exchange, self._answers, progress, meter)

    @property
    def traffic(self) -> Traffic:
        return self._exchange.traffic

    @property
    def was_asked(self) -> bool:
        return self.desk.was_asked

    def begin_round(self) -> None:
        self.desk.begin_round()

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
        self._exchange.close()
        self._answers.close()
        for group in self._groups:
            self._give_back(group)
