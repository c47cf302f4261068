"""Where a script asks for norms of its gradients or scales them: all ranks change to a carrier
that splits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final, Protocol

import torch

from bytesched.observe import Observers
from bytesched.share.turn import released
from bytesched.task import CommTask
from bytesched.tunable import Setting

from ..dependency.context import Context, PlanParts
from ..dependency.progress import Progress
from ..figures.meter import Meter
from ..layout.packing import Packer
from ..layout.plan import Plan
from ..proxies.lazy_grads import QueryHandler
from ..routes.carrier import Carrier, Traffic
from ..routes.streams import Streams
from .expressions import Asked, derived, slots_in
from .operations import ASKING
from .vote import Vote
from .worth import Worth

__all__ = ["SplitCarrier", "Splitter", "Splitting"]

log = logging.getLogger("bytesched")

_VOTE: Final = "split or whole"
_ENTRY: Final = "to split all-reduces"


class SplitCarrier(Carrier, Protocol):
    """Carries every chunk in two phases: its sum to an owner, and from there to all.

    In between it answers for gradients, see `LazyGrad.queries`.
    """

    @property
    def queries(self) -> QueryHandler:
        """What answers."""

    @property
    def asked(self) -> Asked:
        """What the script has asked about or changed in the round."""

    def begin_round(self) -> None:
        """A new backward pass begins: what was asked of the last one is over."""

    def backward_ends(self) -> None:
        """Every gradient of the round is there, and may be asked about."""

    def end_round(self) -> None:
        """Every optimizer has stepped: nothing more is asked."""

    def lost(self) -> BaseException | None:
        """The error of something that is waited for and cannot come, if there is one."""


class Splitter(Protocol):
    """Makes carriers that split every all-reduce."""

    def cut(self, plan: Plan, partition_bytes: int) -> None:
        """Cuts ``plan`` such that every chunk has an owner."""

    def carrier(
        self,
        plan: Plan,
        packer: Packer,
        progress: Progress,
        setting: Setting,
        streams: Streams,
        *,
        reduced: Callable[[CommTask], None],
        meter: Meter,
        observers: Observers,
    ) -> SplitCarrier:
        """Carries the chunks of ``plan``, which was cut here; collective.

        Args:
            progress: of the session; receives the first error.
            setting: its sizes are those of lanes.
            meter: of the session; learns how long norms were waited for.
            reduced: called when the sum of a chunk is in the arena.
        """


class Splitting:
    """Enters and leaves the split, on all ranks before the same round.

    Args:
        mode: "auto", or "on": from the first round on, and for good.
        is_tuned: sizes change while it trains, and are compared by how long steps take: whether
            gradients are late is not, as a split that ends would be taken for what a size brings.
    """

    def __init__(
        self,
        splitter: Splitter,
        parts: PlanParts,
        context: Context,
        setting: Setting,
        *,
        mode: str,
        is_tuned: bool,
        reduced: Callable[[CommTask], None],
    ) -> None:
        self._splitter = splitter
        self._parts = parts
        self._context = context
        self._setting = setting
        self._device = parts.plan.slots[0].view.device
        self._mode = mode
        self._reduced = reduced
        self._said: set[str] = set()
        #: rounds that have begun
        self._rounds = 0
        #: what was carried by carriers that are closed
        self._past = Traffic()
        self._split: SplitCarrier | None = None
        #: of rounds that are over, since the last vote
        self._worth = Worth(is_judged=not is_tuned)
        #: what was asked in this round, while nothing is split
        self._asked = Asked(parts.plan.slots, context.progress)
        #: the backward pass of this round has not ended
        self._is_backward = False
        self._ballot = Vote(context, _VOTE, self._device)
        self._use_queries(self._watch)

    def carrier(self) -> Carrier:
        """What carries the round that begins.

        Collective where the ranks change, as all of them came to the end of the same vote.
        """
        self._rounds += 1
        self._note()
        if self._mode == "on":
            if self._split is None:
                self._change(wanted=True)
        elif (wanted := self._ballot.outcome()) is not None:
            self._change(wanted=wanted)
        return self._parts.carrier if self._split is None else self._split

    def begin_round(self) -> None:
        """A new backward pass begins, and nothing of it is on the wire."""
        self._asked.clear()
        self._is_backward = True
        if self._split is not None:
            self._split.begin_round()
        if self._mode == "auto" and Vote.is_due(self._rounds):
            self._ballot.cast(yes=self._worth.take(is_split=self._split is not None))

    def backward_ends(self) -> None:
        """Every gradient of the round is there."""
        self._is_backward = False
        if self._split is not None:
            self._split.backward_ends()

    def end_round(self) -> None:
        """Every optimizer has stepped."""
        if self._split is not None:
            self._split.end_round()

    @property
    def is_settled(self) -> bool:
        """Whether the ranks have voted on how the round that begins is carried."""
        return self._mode == "on" or self._rounds > 1

    @property
    def traffic(self) -> Traffic:
        """What was carried in split rounds."""
        return self._past if self._split is None else self._past + self._split.traffic

    def change(self, setting: Setting) -> None:
        """Goes on with ``setting``, split or whole as before; collective, between two rounds.

        Nothing may be outstanding.
        """
        before, self._setting = self._setting, setting
        if self._split is None:
            self._parts.cut_whole(setting)
            self._changed()
            return
        # Policy and order are those of whole all-reduces.
        sizes = setting.partition_bytes, setting.credit_bytes
        if sizes != (before.partition_bytes, before.credit_bytes):
            self._note()
            self._end(self._split)
            self._enter()

    def close(self) -> None:
        """Ends what carries split rounds."""
        self._ballot.close()
        if self._split is not None:
            self._split.close()

    def _note(self) -> None:
        """A round is over in which most gradients were asked about or changed, or were not."""
        asked = self._asked if self._split is None else self._split.asked
        if asked.are_most:
            self._worth.note(asked.late_share)

    def _change(self, *, wanted: bool) -> None:
        if wanted == (self._split is not None):
            return
        self._parts.synchronizing.wait_reduced()
        self._parts.synchronizing.synchronize_all()
        if self._split is None:
            self._enter()
            return
        self._end(self._split)
        self._parts.cut_whole(self._setting)
        self._changed()
        self._say(
            "all-reduces are whole again: gradients are here when the script asks for norms of "
            "them, or it asks no more"
        )

    def _enter(self) -> None:
        try:
            # The other ranks have to come here first, for which they may need a turn that a job
            # has which waits for one of this rank.
            with released():
                self._split = self._entered()
        except BaseException as error:  # noqa: BLE001 - it is raised
            # The other ranks learn of it, as they take part in it.
            self._context.progress.raise_first(error)

    def _entered(self) -> SplitCarrier:
        parts, context = self._parts, self._context
        # A rank that has stopped is missed here, not while connections are made.
        here = torch.zeros(1, device=self._device)
        context.backend.wait(context.backend.sum(here, _ENTRY), task=_ENTRY)
        self._splitter.cut(parts.plan, self._setting.partition_bytes)
        parts.plan_cut()
        self._changed()
        split = self._splitter.carrier(
            parts.plan,
            parts.packer,
            context.progress,
            self._setting,
            context.streams,
            reduced=self._reduced,
            meter=context.meter,
            observers=context.observers,
        )
        context.progress.story = split.story
        context.progress.look = split.lost
        self._use_queries(split.queries)
        self._say(
            "the script asks for norms of its gradients, or scales them, before step(): every "
            "all-reduce is split into two halves"
        )
        return split

    def _say(self, what: str) -> None:
        if self._context.backend.rank == 0 and what not in self._said:
            log.info(what)
        self._said.add(what)

    def _end(self, split: SplitCarrier) -> None:
        progress = self._context.progress
        self._use_queries(self._watch)
        self._split = None
        split.close()
        self._past += split.traffic
        progress.story = self._parts.carrier.story
        progress.look = lambda: None

    def _changed(self) -> None:
        self._context.meter.changed(len(self._parts.plan.chunks), self._setting)

    def _use_queries(self, queries: QueryHandler) -> None:
        for slot in self._parts.plan.slots:
            slot.use_queries(queries)

    def _watch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._is_backward:
            return NotImplemented
        if func in ASKING:
            if slots := list(slots_in(args)):
                self._asked.add(slots)
            return NotImplemented
        return derived(func, args, kwargs)
