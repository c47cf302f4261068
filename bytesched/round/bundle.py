"""Gradients whose sums are complete at the same moment: their parameters are updated together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Generic, Protocol, TypeVar

from bytesched.round.gradient import Gradient, refused
from bytesched.task import CommTask

__all__ = ["BUNDLE_AFTER", "OUTSTANDING", "Bundle", "BundleEvent", "BundleState", "Job"]


class BundleState(Enum):
    """Where the update of a bundle stands. Whether its gradients travel is `Round`'s to know."""

    #: its parameters are as a script may read them
    FREE = "free"
    #: a step was taken, and what its update needs is not all there
    ARMED = "armed"
    #: its update can be done, or is being done
    READY = "ready"
    #: its update is done; its parameters are held until their first use
    APPLIED = "applied"

    __hash__ = object.__hash__


class BundleEvent(Enum):
    """What can happen to the update of a bundle."""

    #: a step takes some of its gradients
    ARM = "arm"
    #: all of its sums are there
    COMPLETE = "complete"
    #: all that was armed is done
    UPDATED = "updated"
    #: one of its parameters is used
    READ = "read"
    #: the process is forked, and this is the child
    FORK = "fork"

    __hash__ = object.__hash__


_S, _E = BundleState, BundleEvent

#: The whole life of an update. A pair that is not listed is an InvalidTransition.
BUNDLE_AFTER: Final[Mapping[tuple[BundleState, BundleEvent], BundleState]] = {
    (_S.FREE, _E.ARM): _S.ARMED,
    # Each of several optimizers takes its part.
    (_S.ARMED, _E.ARM): _S.ARMED,
    (_S.READY, _E.ARM): _S.READY,
    (_S.APPLIED, _E.ARM): _S.ARMED,
    (_S.ARMED, _E.COMPLETE): _S.READY,
    (_S.READY, _E.COMPLETE): _S.READY,
    (_S.READY, _E.UPDATED): _S.APPLIED,
    (_S.APPLIED, _E.READ): _S.FREE,
    **{(state, _E.FORK): _S.FREE for state in _S},
}

#: an update is still to be done
OUTSTANDING: Final = frozenset({_S.ARMED, _S.READY})


class Job(Protocol):
    """What is to be done for some gradients of a bundle."""

    @property
    def slots(self) -> Sequence[Gradient]:
        """Those."""


G = TypeVar("G", bound=Gradient)
J = TypeVar("J", bound=Job)


@dataclass(eq=False, repr=False)
class Bundle(Generic[G, J]):
    """Parameters whose gradients are complete at the same moment; they are updated together."""

    index: int
    slots: list[G]
    chunks: set[CommTask]
    #: of its gradients
    nbytes: int
    state: BundleState = field(init=False, default=BundleState.FREE)
    #: the update
    jobs: list[J] = field(init=False, default_factory=list)

    @property
    def is_outstanding(self) -> bool:
        """Whether an update is still to be done."""
        return self.state in OUTSTANDING

    def on(self, event: BundleEvent) -> None:
        """``event`` happens to it."""
        try:
            self.state = BUNDLE_AFTER[self.state, event]
        except KeyError:
            raise refused(self, event) from None

    def __repr__(self) -> str:
        return f"<Bundle {self.index} of {self.slots[0].name} {self.state.value}>"
