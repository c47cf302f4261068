"""What stages take: seconds, bytes that a micro-batch holds, bytes that travel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from bytesched.errors import ConfigError
from bytesched.pipeline.order import Action, Kind

__all__ = ["Link", "Pipeline", "Stage", "cut", "partition"]


@dataclass(frozen=True, slots=True)
class Stage:
    """What one micro-batch takes in one stage, and the bytes of the stage itself."""

    forward_s: float
    #: of the two halves of a backward: the gradient of the input, and those of the weights
    input_gradient_s: float
    weight_gradient_s: float
    #: held from the start of a forward to the end of its backward
    activation_bytes: int = 0
    #: what the next stage reads; its gradient comes back with as many
    output_bytes: int = 0
    parameter_bytes: int = 0

    @property
    def compute_s(self) -> float:
        """Seconds of a whole micro-batch."""
        return self.forward_s + self.input_gradient_s + self.weight_gradient_s


class Link(NamedTuple):
    """What connects two ranks; messages do not wait for each other."""

    bytes_per_s: float
    latency_s: float = 0.0

    def seconds(self, nbytes: int) -> float:
        """How long a message is on its way."""
        return self.latency_s + nbytes / self.bytes_per_s


#: where crossings cost nothing
FREE = Link(float("inf"))


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages on ranks, as ``torch.distributed.pipelining`` runs them.

    There, the first stage has no gradient of its input to compute: its ``I`` does nothing, and its
    ``W`` is a whole backward.
    """

    stages: tuple[Stage, ...]
    stage_ranks: tuple[int, ...]
    link: Link = FREE
    #: copies of the pipeline, among which gradients are reduced
    replicas: int = 1

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return 1 + max(self.stage_ranks)

    def on(self, rank: int) -> list[int]:
        """The stages of a rank."""
        return [stage for stage, its in enumerate(self.stage_ranks) if its == rank]

    def kinds(self, stage: int, split_backward: bool) -> tuple[Kind, ...]:
        """What a micro-batch does in a stage; the first one's backward is never worth a cut."""
        if split_backward and stage:
            return (Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
        return (Kind.FORWARD, Kind.BACKWARD)

    def seconds(self, stage: int, kind: Kind) -> float:
        """How long an action computes."""
        times = self.stages[stage]
        whole_s = times.input_gradient_s + times.weight_gradient_s
        return {
            Kind.FORWARD: times.forward_s,
            Kind.BACKWARD: whole_s,
            Kind.INPUT_GRADIENT: times.input_gradient_s if stage else 0.0,
            Kind.WEIGHT_GRADIENT: times.weight_gradient_s if stage else whole_s,
        }[kind]

    def crossing_s(self, stage: int, other: int) -> float:
        """How long an activation or its gradient travels between neighbours."""
        if self.stage_ranks[stage] == self.stage_ranks[other]:
            return 0.0
        return self.link.seconds(self.stages[min(stage, other)].output_bytes)

    def reduction_s(self, stage: int) -> float:
        """How long the gradients of a stage are on the link of its rank, by a ring."""
        share = 2 * (self.replicas - 1) / self.replicas
        return share * self.stages[stage].parameter_bytes / self.link.bytes_per_s

    def held_bytes(self, action: Action) -> int:
        """What an action adds to the memory of its rank; below 0 for what its end frees."""
        held = self.stages[action.stage].activation_bytes
        if action.kind is Kind.FORWARD:
            return held
        return 0 if action.kind is Kind.INPUT_GRADIENT else -held

    def work_s(self, rank: int) -> float:
        """Seconds of one micro-batch on a rank."""
        return sum(self.stages[stage].compute_s for stage in self.on(rank))

    def least_memory_bytes(self) -> int:
        """What the fullest rank holds at least: all its stages, since forwards come first."""
        return max(
            sum(self.stages[stage].activation_bytes for stage in self.on(rank))
            for rank in range(self.ranks)
        )


def partition(size: int, parts: int, cost: Callable[[int, int], float]) -> list[int]:
    """The bounds of ``parts`` runs of ``size`` things, ``parts + 1`` of them, no run empty.

    The largest ``cost(start, stop)`` of a run is the least that any cut has; of equal cuts it is
    one with a small sum of squares.
    """
    # best[stop]: of the first `stop` in so many parts, (largest, squares, bounds).
    best: list[tuple[float, float, tuple[int, ...]] | None] = [(0.0, 0.0, (0,))] + [None] * size
    for _ in range(parts):
        following: list[tuple[float, float, tuple[int, ...]] | None] = [None] * (size + 1)
        for stop in range(1, size + 1):
            choices = (
                # Rounding must not decide between cuts that are equal.
                (
                    round(max(before[0], last), 12),
                    round(before[1] + last**2, 12),
                    (*before[2], stop),
                )
                for start, before in enumerate(best[:stop])
                if before is not None
                for last in [cost(start, stop)]
            )
            following[stop] = min(choices, default=None)
        best = following
    found = best[size]
    assert found is not None
    return list(found[2])


def cut(chain: Sequence[Stage], stages: int) -> tuple[Stage, ...]:
    """The chain in ``stages`` contiguous parts, so that the slowest part is as fast as it can be.

    Raises ``ConfigError`` if there are fewer links in the chain than parts.
    """
    if len(chain) < stages:
        raise ConfigError(f"{len(chain)} layers cannot be cut into {stages} stages")
    until = [0.0, *accumulate(each.compute_s for each in chain)]
    bounds = partition(len(chain), stages, lambda start, stop: until[stop] - until[start])
    return tuple(_joined(chain[start:stop]) for start, stop in pairwise(bounds))


def _joined(chain: Sequence[Stage]) -> Stage:
    return Stage(
        sum(each.forward_s for each in chain),
        sum(each.input_gradient_s for each in chain),
        sum(each.weight_gradient_s for each in chain),
        sum(each.activation_bytes for each in chain),
        chain[-1].output_bytes,
        sum(each.parameter_bytes for each in chain),
    )
