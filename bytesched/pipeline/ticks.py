"""Seconds and bytes as the small whole numbers that the search computes with."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bytesched.pipeline.order import Action, Kind, needs
from bytesched.pipeline.stages import Pipeline

_PER_S = 10**9
#: of the busiest rank's work on a micro-batch: beyond, the search is slow and no better
_MOST = 240


@dataclass(frozen=True, slots=True)
class Block:
    """One kind of work of one stage, the same for every micro-batch."""

    stage: int
    kind: Kind
    rank: int
    duration: int
    #: bytes that it holds from its start, or below 0, frees at its end
    held: int
    #: positions of the blocks that it needs, and what lies between
    needs: tuple[tuple[int, int], ...]

    def of(self, micro_batch: int) -> Action:
        """The action for a micro-batch."""
        return Action(self.stage, self.kind, micro_batch)


@dataclass(frozen=True)
class Ticks:
    """A pipeline in ticks: exactly if its times have a common measure, rounded if not."""

    blocks: tuple[Block, ...]
    ranks: int
    #: of the gradients of each stage
    reductions: tuple[int, ...]
    stage_ranks: tuple[int, ...]
    tick_s: float
    exact: bool

    @classmethod
    def of(cls, pipeline: Pipeline, split_backward: bool, most: int = _MOST) -> Ticks:
        """The blocks of a micro-batch, forward first, in an order in which none needs a later.

        Args:
            most: ticks of the busiest rank's work on a micro-batch.
        """
        stages = range(len(pipeline.stages))
        actions = [Action(stage, Kind.FORWARD, 0) for stage in stages]
        for stage in reversed(stages):
            kinds = pipeline.kinds(stage, split_backward)[1:]
            actions += [Action(stage, kind, 0) for kind in kinds]
        times_s = [pipeline.seconds(action.stage, action.kind) for action in actions]
        times_s += [pipeline.crossing_s(stage, stage + 1) for stage in stages[:-1]]
        times_s += [pipeline.reduction_s(stage) for stage in stages]
        measure = math.gcd(*(round(time_s * _PER_S) for time_s in times_s)) or 1
        busiest = max(pipeline.work_s(rank) for rank in range(pipeline.ranks)) * _PER_S
        exact = busiest / measure <= most
        tick_s = (measure if exact else busiest / most) / _PER_S

        def ticks(time_s: float) -> int:
            return round(time_s / tick_s)

        at = {action: position for position, action in enumerate(actions)}

        def block(action: Action) -> Block:
            stage, kind, _ = action
            needed = tuple(
                (at[need], ticks(pipeline.crossing_s(need.stage, stage)))
                for need in needs(action, len(stages), at)
            )
            duration, held = ticks(pipeline.seconds(stage, kind)), pipeline.held_bytes(action)
            return Block(stage, kind, pipeline.stage_ranks[stage], duration, held, needed)

        return cls(
            tuple(map(block, actions)),
            pipeline.ranks,
            tuple(ticks(pipeline.reduction_s(stage)) for stage in stages),
            pipeline.stage_ranks,
            tick_s,
            exact,
        )

    def on(self, rank: int) -> list[int]:
        """Positions of a rank's blocks."""
        return [position for position, block in enumerate(self.blocks) if block.rank == rank]

    def work(self, rank: int) -> int:
        """Ticks of a micro-batch on a rank."""
        return sum(self.blocks[position].duration for position in self.on(rank))

    def earliest(self) -> list[int]:
        """When each block can start, at best, after the start of its micro-batch."""
        starts: list[int] = []
        for block in self.blocks:
            arrivals = (starts[n] + self.blocks[n].duration + gap for n, gap in block.needs)
            starts.append(max(arrivals, default=0))
        return starts

    def after(self) -> list[int]:
        """What has to follow the end of each block, at best: of the chain, or its reduction."""
        tails = [0 if block.held >= 0 else self.reductions[block.stage] for block in self.blocks]
        for position in reversed(range(len(self.blocks))):
            block = self.blocks[position]
            for needed, gap in block.needs:
                tails[needed] = max(tails[needed], gap + block.duration + tails[position])
        return tails

    def period(self, memory_bytes: int) -> int:
        """A bound below which no rank takes another micro-batch again and again."""
        starts = self.earliest()
        works = [self.work(rank) for rank in range(self.ranks)]
        helds = [self._held_for(rank, 1, memory_bytes, starts) for rank in range(self.ranks)]
        return max(1, *works, *helds)

    def _held_for(self, rank: int, micro_batches: int, memory_bytes: int, starts: list[int]) -> int:
        """How long a rank has to hold activations of so many micro-batches, within a memory.

        What each of them holds, times how long it does so at best, takes as much of the memory.

        Args:
            starts: the earliest ones.
        """
        own = [n for n in self.on(rank) if self.blocks[n].held]
        measure = math.gcd(*(self.blocks[n].held for n in own))
        if not measure:
            return 0
        # From the start of what holds to the end of what frees.
        taken = -sum(
            block.held * (start + (block.duration if block.held < 0 else 0))
            for start, block in ((starts[n], self.blocks[n]) for n in own)
        )
        return -(-micro_batches * taken // (memory_bytes // measure * measure))

    def least(self, micro_batches: int, memory_bytes: int) -> int:
        """A bound below which no iteration within the memory ends."""
        starts, tails = self.earliest(), self.after()
        bounds = [
            start + block.duration + tail
            for start, block, tail in zip(starts, self.blocks, tails, strict=True)
        ]
        for rank in range(self.ranks):
            own = self.on(rank)
            bounds.append(
                min(starts[n] for n in own)
                + micro_batches * self.work(rank)
                + min(tails[n] for n in own)
            )
            holding = [n for n in own if self.blocks[n].held]
            if holding:
                bounds.append(
                    min(starts[n] for n in holding)
                    + self._held_for(rank, micro_batches, memory_bytes, starts)
                    + min(tails[n] for n in holding if self.blocks[n].held < 0)
                )
        return max(bounds)
