"""Round: a round of gradients and their updates, as a pure state machine. Events in, commands out.

No thread, clock, lock or tensor. Events come for lists where they come together. What they return
is to be done: chunks to be submitted, bundles to be updated, gradients that are lost. Whoever
drives it calls one method at a time, under one lock; `gradient`, which is in the way of every
tensor of a backward pass, needs none: no chunk of a gradient can be summed before it has come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Generic

from bytesched.errors import InvalidTransition
from bytesched.round.bundle import (
    BUNDLE_AFTER,
    OUTSTANDING,
    Bundle,
    BundleEvent,
    BundleState,
    G,
    J,
)
from bytesched.round.gradient import (
    AFTER,
    TO_COME,
    Gradient,
    GradientEvent,
    GradientState,
    refused,
)
from bytesched.task import CommTask

__all__ = ["Round"]


class Round(Generic[G, J]):
    """Every gradient of a model, from the begin of a round to the update of its parameter.

    Gradients are known from the start, chunks and bundles once the model is `cut` into them.
    """

    def __init__(self, gradients: Sequence[G]) -> None:
        self._gradients = list(gradients)
        self._chunks: Sequence[CommTask] = ()
        self._bundles: Sequence[Bundle[G, J]] = ()
        #: by the index of a chunk
        self._gradients_of: Sequence[Sequence[G]] = ()
        self._bundles_of: Sequence[Sequence[Bundle[G, J]]] = ()
        #: chunks that are under way: the only count of what is complete. Written under one lock; a
        #: question may be asked without it, and is answered at once
        self.unsummed: set[CommTask] = set()
        #: bundles that are not free
        self.held = 0
        #: gradients that have not come, in a round that has begun
        self.missing = 0
        #: backward goes on
        self.is_open = False

    # -- events ------------------------------------------------------------------------

    def cut(
        self,
        chunks: Sequence[CommTask],
        gradients_of: Sequence[Sequence[G]],
        bundles: Sequence[Bundle[G, J]],
        bundles_of: Sequence[Sequence[Bundle[G, J]]],
    ) -> None:
        """Gradients are cut into chunks, and these lists say how; nothing is under way.

        Whoever cuts them anew may do so in place, while that is true.

        Args:
            gradients_of: those in each chunk, by its index; ``bundles_of`` likewise.
        """
        if self.unsummed:
            raise InvalidTransition(f"'cut' of {self!r}")
        self._chunks, self._gradients_of = chunks, gradients_of
        self._bundles, self._bundles_of = bundles, bundles_of
        self.held = sum(bundle.state is not BundleState.FREE for bundle in bundles)

    def begin(self) -> None:
        """The first gradient of a backward pass is about to come; nothing is outstanding."""
        if self.unsummed:
            raise InvalidTransition(f"a round begins on {self!r}")
        self.unsummed.update(self._chunks)
        held = {id(g) for b in self._bundles if b.state is BundleState.APPLIED for g in b.slots}
        for gradient in self._gradients:
            event = GradientEvent.ROUND_HELD if id(gradient) in held else GradientEvent.ROUND
            try:
                gradient.state = AFTER[gradient.state, event]
            except KeyError:
                raise refused(gradient, event) from None
            gradient.fired = 0
            gradient.is_apart = False
        self.missing = len(self._gradients)
        self.is_open = True

    def gradient(self, gradient: G) -> list[CommTask]:
        """Backward has computed it. Returns the chunks to be submitted, which have all of theirs.

        On the critical path of every parameter's backward: no calls but those of its chunks.
        """
        try:
            gradient.state = AFTER[gradient.state, GradientEvent.GRADIENT]
        except KeyError:
            raise refused(gradient, GradientEvent.GRADIENT) from None
        self.missing -= 1
        ready = []
        for chunk in gradient.chunks:
            if chunk.notify_ready():
                ready.append(chunk)
        return ready

    def absent(self, gradient: G) -> list[CommTask]:
        """Backward is over without it. Returns chunks as `gradient` does."""
        gradient.on(GradientEvent.NONE)
        self.missing -= 1
        return [chunk for chunk in gradient.chunks if chunk.notify_ready()]

    def end(self) -> None:
        """Backward is over."""
        self.is_open = False

    def found(self, used: Mapping[G, bool]) -> None:
        """Whether any rank has computed these, of which this one may not have."""
        for gradient, is_used in used.items():
            if gradient.state is GradientState.ABSENT:
                gradient.on(GradientEvent.USED if is_used else GradientEvent.UNUSED)
                self._catch_up(gradient)

    def read(self, gradients: Iterable[G]) -> None:
        """The parameters of these are about to be used."""
        for gradient in gradients:
            if gradient.state is GradientState.UNREAD:
                gradient.state = GradientState.AWAITED

    def summed(self, chunk: CommTask) -> list[Bundle[G, J]]:
        """The sum of ``chunk`` is complete. Returns the bundles that can be updated now."""
        unsummed = self.unsummed
        if chunk not in unsummed:
            raise InvalidTransition(f"'summed' of {chunk!r}, which is not on its way in {self!r}")
        unsummed.remove(chunk)
        for gradient in self._gradients_of[chunk.index]:
            if unsummed.isdisjoint(gradient.chunks):
                try:
                    gradient.state = AFTER[gradient.state, GradientEvent.SUM]
                except KeyError:
                    raise refused(gradient, GradientEvent.SUM) from None
        ready = []
        for bundle in self._bundles_of[chunk.index]:
            if bundle.jobs and unsummed.isdisjoint(bundle.chunks):
                bundle.state = BUNDLE_AFTER[bundle.state, BundleEvent.COMPLETE]
                ready.append(bundle)
        return ready

    def step(self, gradients: Iterable[G]) -> None:
        """A step uses these at once."""
        for gradient in gradients:
            try:
                gradient.state = AFTER[gradient.state, GradientEvent.STEP]
            except KeyError:
                raise refused(gradient, GradientEvent.STEP) from None

    def arm(self, jobs: Mapping[Bundle[G, J], Sequence[J]]) -> tuple[list[Bundle[G, J]], int]:
        """A step takes the gradients of all jobs, which wait for sums.

        Returns the bundles that can be updated now, and the bytes of those that cannot, and that
        no step had armed before.
        """
        ready, crossing_bytes = [], 0
        for bundle, added in jobs.items():
            for job in added:
                for gradient in job.slots:
                    try:
                        gradient.state = AFTER[gradient.state, GradientEvent.ARM]
                    except KeyError:
                        raise refused(gradient, GradientEvent.ARM) from None
            bundle.jobs += added
            before = bundle.state
            self.held += before is BundleState.FREE
            bundle.state = BUNDLE_AFTER[before, BundleEvent.ARM]
            if self.unsummed.isdisjoint(bundle.chunks):
                bundle.state = BUNDLE_AFTER[bundle.state, BundleEvent.COMPLETE]
                ready.append(bundle)
            elif before not in OUTSTANDING:
                crossing_bytes += bundle.nbytes
        return ready, crossing_bytes

    def take(self, bundle: Bundle[G, J]) -> list[J]:
        """What can be done of the update of ``bundle``, which is the caller's to do."""
        if self.sums(bundle.chunks):
            return []
        taken, bundle.jobs = bundle.jobs, []
        return taken

    def updated(self, bundles: Iterable[Bundle[G, J]], gradients: Iterable[G]) -> None:
        """The updates that were taken of these are done."""
        for bundle in bundles:
            # Another step may have armed more of it meanwhile.
            if not bundle.jobs:
                try:
                    bundle.state = BUNDLE_AFTER[bundle.state, BundleEvent.UPDATED]
                except KeyError:
                    raise refused(bundle, BundleEvent.UPDATED) from None
        for gradient in gradients:
            try:
                gradient.state = AFTER[gradient.state, GradientEvent.UPDATE]
            except KeyError:
                raise refused(gradient, GradientEvent.UPDATE) from None

    def use(self, bundle: Bundle[G, J]) -> None:
        """A parameter of ``bundle`` is used for the first time since the update."""
        try:
            bundle.state = BUNDLE_AFTER[bundle.state, BundleEvent.READ]
        except KeyError:
            raise refused(bundle, BundleEvent.READ) from None
        self.held -= 1
        for gradient in bundle.slots:
            if gradient.state is GradientState.UNREAD:
                gradient.state = GradientState.AWAITED

    def fork(self) -> tuple[list[G], list[G]]:
        """This is a forked child, in which nothing goes on.

        Returns the gradients that never come, and those whose parameters are never updated.
        """
        stale = [gradient for b in self._bundles if b.is_outstanding for gradient in b.slots]
        lost = [gradient for gradient in self._gradients if self.sums(gradient.chunks)]
        for gradient in self._gradients:
            gradient.on(GradientEvent.FORK)
        for gradient in lost:
            gradient.on(GradientEvent.FORK_UNDER_WAY)
        for bundle in self._bundles:
            bundle.on(BundleEvent.FORK)
        self.held = 0
        return lost, stale

    # -- state -------------------------------------------------------------------------

    def sums(self, chunks: Iterable[CommTask]) -> bool:
        """Whether any of ``chunks`` is not summed."""
        return not self.unsummed.isdisjoint(chunks)

    @property
    def incomplete(self) -> bool:
        """Whether some gradient has not come in the round that has begun."""
        return self.is_open and self.missing > 0

    def absentees(self) -> list[G]:
        """The gradients that have not come in this round."""
        return [gradient for gradient in self._gradients if gradient.state in TO_COME]

    def story(self) -> str:
        """How many gradients and bundles are in which state, for the message of an error."""
        return "\n".join(
            f"  {kind}: {_listed(things)}"
            for kind, things in (("gradients", self._gradients), ("updates", self._bundles))
            if things
        )

    def validate(self) -> None:
        """Raises AssertionError unless every invariant holds."""
        for gradient in self._gradients:
            travels = self.sums(gradient.chunks)
            if gradient.state in _TRAVELLING:
                assert travels or not self._chunks, repr(gradient)
            if gradient.state in _SUMMED:
                assert not travels, repr(gradient)
        armed = {g for b in self._bundles for job in b.jobs for g in job.slots}
        for taken in armed:
            assert taken.state in {GradientState.ARMED, GradientState.DUE}, repr(taken)
        assert self.held == sum(bundle.state is not BundleState.FREE for bundle in self._bundles)
        for bundle in self._bundles:
            if bundle.jobs:
                assert bundle.is_outstanding, repr(bundle)
            if bundle.state is BundleState.ARMED:
                assert self.sums(bundle.chunks), repr(bundle)

    # -- decisions ---------------------------------------------------------------------

    def _catch_up(self, gradient: G) -> None:
        """Its chunks may have been summed before it was known that it is used."""
        is_travelling = gradient.state is GradientState.TRAVELLING
        if is_travelling and not self.sums(gradient.chunks):
            gradient.on(GradientEvent.SUM)

    def __repr__(self) -> str:
        backward = f"backward, {self.missing} to come, " if self.is_open else ""
        return f"<Round {backward}{len(self.unsummed)} chunks to be summed>"


_TRAVELLING = frozenset({GradientState.TRAVELLING, GradientState.ARMED})
_SUMMED = frozenset({GradientState.SUMMED, GradientState.DUE, GradientState.APPLIED})


def _listed(things: Iterable[Gradient] | Iterable[Bundle[G, J]]) -> str:
    counts = Counter(thing.state.value for thing in things)
    return ", ".join(f"{count} {state}" for state, count in counts.most_common())
