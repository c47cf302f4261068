"""Whether gradients go in two halves, where both ranks ask about them on their way, and how.

Owners have whole tensors, so that a norm is the same number whoever takes it. What backward
computes first goes whole, as far as the link has time for it: its way back is over before anything
waits.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any, Final

import torch

from .buckets import Bucket, Member
from .cutting import Way
from .wire import Wire

#: the round of the first vote, when the ranks know how long all of it takes; then 8, 16, …
_FIRST: Final = 4
#: A norm waits for all late bytes where they are sent whole, for half of them in two halves, which
#: cost more messages: so much of all bytes has to be late, on average of so many rounds.
_LATE: Final = 0.15
_JUDGED: Final = 8
#: From this share of all bytes on, a script has asked about its gradients, and not about some.
_MOST: Final = 0.5
#: A tensor is in front if all before it have less than one part in so many of its bytes.
_FRONT: Final = 16
#: by how much the last sum may end later before that counts as a delay
_UNNOTICED: Final = 1.002
#: how finely it is tried what goes whole: so many units of neighbours, in so many parts
_UNITS: Final = 48
_PARTS: Final = 4


class Splitting:
    """The ranks' vote on it, beside some rounds; all of them act on it before the same round.

    Args:
        mode: "auto", "on" from the first planned round on, or "off".
    """

    def __init__(self, wire: Wire, mode: str) -> None:
        self._wire = wire
        self._mode = mode
        self._rounds = 0
        #: rounds in which the script has asked, whether it has since the last vote, and the sum of
        #: the shares of those rounds that were late
        self._asking, self._was_asked, self._late = 0, False, 0.0
        #: whose gradients the script has asked about in this round, and how much was late then
        self._asked: dict[Bucket, None] = {}
        self._late_bytes = 0
        self._vote: torch.Tensor | None = None
        self._voting: Any = None
        self._is_wanted = mode == "on"

    def ask(self, members: Iterable[Member], late_bytes: Callable[[], int]) -> None:
        """The script asks about these.

        Args:
            late_bytes: how much of the round has not come.
        """
        if self._mode != "auto":
            return
        if not self._asked:
            self._late_bytes = late_bytes()
        self._asked |= dict.fromkeys(member.bucket for member in members)

    def round_begins(self, buckets: Iterable[Bucket]) -> bool:
        """Whether the round that begins is the first one in two halves.

        Args:
            buckets: of the round before.
        """
        if self._is_wanted:
            self._mode, self._is_wanted = "off", False
            return True
        if self._asked:
            asked_bytes = sum(bucket.buffer.nbytes for bucket in self._asked)
            nbytes = sum(bucket.buffer.nbytes for bucket in buckets)
            if asked_bytes and asked_bytes >= _MOST * nbytes:
                self._asking, self._was_asked = self._asking + 1, True
                self._late += self._late_bytes / nbytes
            self._asked.clear()
        return False

    def round_ends(self) -> None:
        """All of its chunks have been issued: a vote goes behind them."""
        self._rounds += 1
        is_due = self._rounds >= _FIRST and self._rounds & (self._rounds - 1) == 0
        if self._mode != "auto" or not is_due:
            return
        wants, self._was_asked = self._was_asked, False
        if self._asking >= _JUDGED:
            wants = wants and self._late >= _LATE * self._asking
            self._asking, self._late = 0, 0.0
        self._vote = torch.tensor([0.0 if wants else 1.0], dtype=torch.float64, device="cpu")
        self._voting = self._wire.start_largest(self._vote)

    def landed(self) -> None:
        """Nothing else is under way. Raises `TransportError`."""
        if self._vote is not None:
            self._wire.wait(self._voting, "a vote on halves")
            self._is_wanted = not float(self._vote)
            self._vote = self._voting = None

    def forget(self) -> None:
        """Lets go of a vote that is under way, and of buckets."""
        self._vote = self._voting = None
        self._asked.clear()


@dataclass(frozen=True)
class Gradient:
    """One gradient in a bucket."""

    #: of its parameter
    key: int
    nbytes: int
    #: the number of its bucket, and when that is ready on the last rank
    bucket: int = 0
    ready_s: float = 0.0


def dealt(
    gradients: Sequence[Gradient], seconds_per_byte: float, late_bytes: int
) -> dict[int, Way]:
    """The way of each of ``gradients``, by key; the same for the same numbers.

    Args:
        gradients: in the order in which they are sent.
        seconds_per_byte: of a whole all-reduce; 0 if that is not known.
        late_bytes: what is computed last, and has so many, goes whole in any case.
    """
    late: set[int] = set()
    after_bytes = 0
    for gradient in reversed(gradients):
        # There is no time for its way back before the forward pass, which begins with it.
        if gradient.nbytes >= late_bytes and gradient.nbytes > _FRONT * after_bytes:
            late.add(gradient.key)
        after_bytes += gradient.nbytes
    ways = _dealt(gradients, late)
    if not seconds_per_byte:
        return ways
    limit_s = _UNNOTICED * _end_s(gradients, ways, seconds_per_byte)
    for unit in _units(gradients):
        for part in range(_PARTS, 0, -1):
            tried = ways | {
                gradient.key: Way(gradient.nbytes * part // _PARTS, ways[gradient.key].owner)
                for gradient in unit
                if gradient.key not in late
            }
            if _end_s(gradients, tried, seconds_per_byte) <= limit_s:
                ways = tried
                break
    return ways


def _dealt(gradients: Sequence[Gradient], late: Container[int]) -> dict[int, Way]:
    """Each bucket is dealt to the rank that has least; ``late`` ones go whole.

    So what is still to come is even over the ranks at any time, above all at the end.
    """
    ways = {gradient.key: Way(gradient.nbytes, 0) for gradient in gradients}
    loads = [0, 0]
    early = (gradient for gradient in gradients if gradient.key not in late)
    for _, bucket in groupby(early, key=attrgetter("bucket")):
        here = list(bucket)
        level = (sum(loads) + sum(gradient.nbytes for gradient in here)) / 2
        owner = 0
        for gradient in here:
            # Neighbours of one owner go together.
            if loads[0] + gradient.nbytes / 2 > level:
                owner = 1
            loads[owner] += gradient.nbytes
            ways[gradient.key] = Way(0, owner)
    return ways


def _units(gradients: Sequence[Gradient]) -> Iterator[list[Gradient]]:
    """Neighbours, each time so many that trying all takes no time that anyone notices."""
    least_bytes = sum(gradient.nbytes for gradient in gradients) / _UNITS
    unit: list[Gradient] = []
    for gradient in gradients:
        unit.append(gradient)
        if sum(one.nbytes for one in unit) >= least_bytes:
            yield unit
            unit = []
    yield unit


def _end_s(gradients: Sequence[Gradient], ways: dict[int, Way], seconds_per_byte: float) -> float:
    """When the last sum has ended: each rank's link takes one after the other."""
    free_s = [0.0, 0.0]
    for gradient in gradients:
        whole_bytes, owner = ways[gradient.key]
        for rank in (0, 1):
            # An owner takes all that the other has; in an all-reduce as much comes to both.
            nbytes = gradient.nbytes if rank == owner else whole_bytes
            if nbytes:
                free_s[rank] = max(free_s[rank], gradient.ready_s) + seconds_per_byte * nbytes
    return max(free_s)
