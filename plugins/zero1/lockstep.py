"""Whether all ranks of a sharded session take the same steps: each waits for what others update."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple
from zlib import crc32

from bytesched.errors import BytesschedError, MismatchError, PeerLost

from ..dependency.progress import Progress

__all__ = ["Lockstep", "Place"]

#: What is taken is a sum of checksums: of optimizers that step in another order it is the same.
_SUMS: Final = 1 << 62


class Place(NamedTuple):
    """How far the script of a rank has come."""

    #: where all ranks must have taken the same steps: before a round, and before gradients that no
    #: step has taken are sent to all ranks
    points: int
    rounds: int
    #: calls of ``step()`` that have taken gradients, and a checksum of which ones
    steps: int
    taken: int
    #: a checksum of the gradients that are sent at this point; 0 before a round
    sent: int
    #: of the last place: some gradients of this round will never come
    in_backward: bool = False


class Lockstep:
    """Compares what this rank has taken with what others announce; nobody waits for that.

    A rank announces where it is at each point, and when it ends. One that has taken a step which
    another has left out learns so when that one has gone on, in place of a timeout.

    Args:
        announce: tells all other ranks a place, and whether it is the last one.
    """

    def __init__(
        self, progress: Progress, rank: int, announce: Callable[[Place, bool], None]
    ) -> None:
        self._progress = progress
        self._rank = rank
        self._announce = announce
        #: guards what follows
        self._lock = threading.Lock()
        #: at the last point, and now; the first round begins before this
        self._before = self._here = Place(0, 1, 0, 0, 0)
        #: this rank has not done its part of the round
        self._in_backward = False
        self._has_ended = False
        #: of other ranks, and whether they have ended there
        self._there: dict[int, tuple[Place, bool]] = {}

    def takes(self, optimizer: int, positions: Iterable[int]) -> None:
        """A step takes gradients at ``positions`` of the plan. Raises if others leave it out."""
        if checksum := _checksum(positions, optimizer):
            with self._lock:
                here = self._here
                taken = (here.taken + checksum) % _SUMS
                self._here = here._replace(steps=here.steps + 1, taken=taken)
            self._check()

    def begins_round(self) -> None:
        """A backward pass begins. Raises if others have taken other steps."""
        self._in_backward = True
        self._reach(rounds=1, sent=0)

    def ends_backward(self) -> None:
        """Every gradient of the round is there. Raises if another rank ended before that."""
        with self._lock:
            self._in_backward = False
        self._check()

    def sends(self, positions: Iterable[int]) -> None:
        """Gradients at ``positions`` are sent to all ranks. Raises if others do otherwise."""
        self._reach(rounds=0, sent=_checksum(positions, -1))

    def ends(self) -> None:
        """Nothing more is taken. Idempotent."""
        if not self._has_ended:
            self._has_ended = True
            self._announce(self._here._replace(in_backward=self._in_backward), True)

    def heard(self, rank: int, place: Place, is_last: bool) -> None:
        """Another rank has announced its place. A thread of the carrier."""
        with self._lock:
            self._there[rank] = place, is_last
        if (error := self._complaint()) is not None:
            self._progress.fail(error)

    def _reach(self, *, rounds: int, sent: int) -> None:
        with self._lock:
            here = self._here
            self._here = self._before = here._replace(
                points=here.points + 1, rounds=here.rounds + rounds, sent=sent
            )
        self._announce(self._here, False)
        self._check()

    def _check(self) -> None:
        if (error := self._complaint()) is not None:
            self._progress.fail(error)
            self._progress.check()

    def _complaint(self) -> BytesschedError | None:
        with self._lock:
            for rank, (place, is_last) in self._there.items():
                error = self._of_end(rank, place) if is_last else self._of_point(rank, place)
                if error is not None:
                    return error
        return None

    def _of_end(self, rank: int, place: Place) -> BytesschedError | None:
        here, why = self._here, ""
        if here.rounds > place.rounds:
            why = (
                f"after {place.rounds} rounds, rank {self._rank} is in round {here.rounds}: give "
                "every rank the same number of batches"
            )
        elif here.points > place.points or (here.points == place.points and _is_past(here, place)):
            why = (
                f"after {_steps(place)}, rank {self._rank} has taken {_steps(here)} and waits for "
                f"the parameters that rank {rank} would have updated: see its own log for the "
                "reason"
            )
        elif place.in_backward and here.rounds == place.rounds and not self._in_backward:
            why = (
                f"inside the backward pass of round {place.rounds}, whose gradients rank "
                f"{self._rank} waits for: see its own log for the reason"
            )
        if not why:
            return None
        return PeerLost(f"rank {rank} has ended its training {why}", peers=[rank], rank=self._rank)

    def _of_point(self, rank: int, place: Place) -> BytesschedError | None:
        if place.points == self._before.points:
            here = self._before
            is_same = here == place
        elif place.points == self._here.points + 1:
            # It takes nothing more before that point, this rank perhaps does.
            here = self._here
            is_same = not _is_past(here, place)
        else:
            return None
        if is_same:
            return None
        if here.steps != place.steps:
            why = (
                f"rank {rank} goes on to its next forward or backward pass after {_steps(place)}, "
                f"rank {self._rank} has taken {_steps(here)}: on one of them a step was left "
                "out, or none of its parameters had a gradient"
            )
        elif here.taken != place.taken:
            why = (
                f"step() number {here.steps} or one before took gradients on rank {rank} which "
                f"it did not take on rank {self._rank}, or the other way round: on one of them a "
                "gradient was set to None"
            )
        else:
            why = (
                f"rank {rank} and rank {self._rank} do not keep the same gradients between "
                "backward() and the next forward pass: on one of them they were replaced, or "
                "dropped by zero_grad()"
            )
        return MismatchError(
            f"{why}. With shard=True each rank waits for what the others update: do the same on "
            "all ranks, or train without shard=True"
        )


def _is_past(here: Place, place: Place) -> bool:
    """Whether steps were taken ``here`` that were not taken at ``place``, which takes no more."""
    return here.steps > place.steps or (here.steps == place.steps and here.taken != place.taken)


def _steps(place: Place) -> str:
    return f"{place.steps} calls of step() with gradients"


def _checksum(positions: Iterable[int], of: int) -> int:
    """0 for no positions."""
    numbers = array("q", sorted(positions))
    return 1 + crc32(array("q", [of, *numbers]).tobytes()) if numbers else 0
