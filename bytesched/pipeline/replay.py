"""What an order takes: every rank follows its row and waits for what an action needs.

It knows nothing of the search, and judges what the search finds and torch's own orders alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from bytesched.errors import ConfigError
from bytesched.pipeline.order import Action, Kind, Order, in_turn
from bytesched.pipeline.stages import Pipeline


class Span(NamedTuple):
    """One action."""

    rank: int
    action: Action
    start_s: float
    end_s: float


class Transfer(NamedTuple):
    """What an action made, on its way to another rank."""

    source: int
    target: int
    action: Action
    start_s: float
    end_s: float


class Reduction(NamedTuple):
    """The gradients of a stage on the link of its rank."""

    rank: int
    stage: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """One iteration, in seconds from its start."""

    #: rank by rank, in the order of its row
    spans: tuple[Span, ...]
    transfers: tuple[Transfer, ...]
    reductions: tuple[Reduction, ...]
    #: the most bytes of activations that each rank holds
    peak_bytes: tuple[int, ...]

    @property
    def end_s(self) -> float:
        """When everything has ended, reductions included."""
        ends_s = [span.end_s for span in self.spans]
        return max([*ends_s, *(reduction.end_s for reduction in self.reductions)])

    @property
    def bubble_share(self) -> float:
        """The part of all ranks' time in which they compute nothing."""
        if not self.end_s:
            return 0.0
        computed_s = sum(span.end_s - span.start_s for span in self.spans)
        return 1 - computed_s / (len(self.peak_bytes) * self.end_s)

    def link_share(self, rank: int) -> float:
        """The part of its time for which a rank's link carries what leaves it; above 1: too much.

        Messages are not made to wait for each other, so that this is how far to trust that.
        """
        if not self.end_s:
            return 0.0
        sent_s = sum(each.end_s - each.start_s for each in self.transfers if each.source == rank)
        reduced_s = sum(each.end_s - each.start_s for each in self.reductions if each.rank == rank)
        return (sent_s + reduced_s) / self.end_s


def replay(order: Order, pipeline: Pipeline) -> Timeline:
    """The timeline of an order. Raises ``ConfigError`` if it is for other stages or ranks."""
    if order.stage_ranks != pipeline.stage_ranks:
        raise ConfigError(
            f"{order.origin} has its stages on ranks {list(order.stage_ranks)}, the pipeline on "
            f"{list(pipeline.stage_ranks)}"
        )
    spans: dict[Action, Span] = {}
    transfers: list[Transfer] = []
    at_s = [0.0] * order.ranks
    #: when each stage has all its gradients
    done_s = [0.0] * order.stages
    for action, needed in in_turn(order.rows, order.stages):
        rank = order.stage_ranks[action.stage]
        start_s = at_s[rank]
        for need in needed:
            made = spans[need]
            arrival_s = made.end_s + pipeline.crossing_s(need.stage, action.stage)
            start_s = max(start_s, arrival_s)
            if made.rank != rank:
                transfers.append(Transfer(made.rank, rank, need, made.end_s, arrival_s))
        at_s[rank] = start_s + pipeline.seconds(action.stage, action.kind)
        spans[action] = Span(rank, action, start_s, at_s[rank])
        if action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT):
            done_s[action.stage] = max(done_s[action.stage], at_s[rank])
    rows = [[action for action in row if action is not None] for row in order.rows]
    return Timeline(
        tuple(spans[action] for row in rows for action in row),
        tuple(transfers),
        _reductions(done_s, pipeline),
        # A forward holds from its start, a backward to its end.
        tuple(max(accumulate(map(pipeline.held_bytes, row), initial=0)) for row in rows),
    )


def _reductions(done_s: Sequence[float], pipeline: Pipeline) -> tuple[Reduction, ...]:
    """A link takes them one after the other, in the order in which stages are done."""
    free_s = [0.0] * pipeline.ranks
    reductions = []
    for stage in sorted(range(len(done_s)), key=lambda each: (done_s[each], -each)):
        seconds = pipeline.reduction_s(stage)
        if seconds:
            rank = pipeline.stage_ranks[stage]
            start_s = max(free_s[rank], done_s[stage])
            free_s[rank] = start_s + seconds
            reductions.append(Reduction(rank, stage, start_s, free_s[rank]))
    return tuple(reductions)
