"""An order without a solver: whenever a rank is free, it takes the most urgent thing that is there.

List scheduling (Graham, 1969) within a memory. It never ends in a deadlock: younger micro-batches
leave room for the first that still has forwards to do on a rank (the banker's algorithm, Dijkstra,
1965), so that the oldest can always go on.
"""

from __future__ import annotations

import heapq
import math
from itertools import product

from bytesched.pipeline.order import Action, Kind
from bytesched.pipeline.solver import Budget
from bytesched.pipeline.ticks import Block, Ticks
from bytesched.pipeline.whole import Rows

#: between the starts of micro-batches, and how much more urgent one is than the next, in periods
_SPACINGS = (0.8, 1.0, 1.1, 0.0, 0.9, 1.2, 1.05, 1.3, 1.5, 2.0)
_AGES = (1.0, 0.0, 2.0)
#: actions that are placed in a second of the limit; a half of it if all were tried
_ACTIONS_PER_S = 10_000


def greedy(ticks: Ticks, micro_batches: int, memory_bytes: int, budget: Budget) -> Rows:
    """The best of some orders, each made with other measures of what is urgent."""
    period = ticks.period(memory_bytes)
    tries = round(budget.limit_s * _ACTIONS_PER_S / (micro_batches * len(ticks.blocks)))
    best: tuple[int, Rows] | None = None
    for spacing, age in list(product(_SPACINGS, _AGES))[: max(1, tries)]:
        if best is not None and budget.left_s == 0:
            budget.cut_short = True
            break
        run = _Run(ticks, micro_batches, memory_bytes, round(spacing * period), age * period)
        found = run.order()
        if best is None or found[0] < best[0]:
            best = found
    assert best is not None
    return best[1]


class _Run:
    """Ranks that work on what has arrived, micro-batches starting ``spacing`` apart."""

    def __init__(
        self, ticks: Ticks, micro_batches: int, memory_bytes: int, spacing: int, age: float
    ) -> None:
        self._blocks = blocks = ticks.blocks
        self._reductions = ticks.reductions
        self._micro_batches = micro_batches
        self._memory_bytes = memory_bytes
        self._age = age
        # Nobody waits for gradients of weights: they are for when a rank has nothing else to do.
        self._urgency = [
            math.inf if block.kind is Kind.WEIGHT_GRADIENT else float(start)
            for start, block in zip(ticks.earliest(), blocks, strict=True)
        ]
        self._own = [ticks.on(rank) for rank in range(ticks.ranks)]
        self._needed_by: list[list[tuple[int, int]]] = [[] for _ in blocks]
        for n, block in enumerate(blocks):
            for needed, gap in block.needs:
                self._needed_by[needed].append((n, gap))
        #: the micro-batch that each block takes next; of every one, how many needs are not over,
        #: and when the others have arrived
        self._next = [0] * len(blocks)
        self._missing = [[len(block.needs)] * micro_batches for block in blocks]
        self._arrived = [[0] * micro_batches for _ in blocks]
        self._arrived[0] = [spacing * n for n in range(micro_batches)]
        self._free = [0] * ticks.ranks
        #: what each rank holds of every micro-batch, of all, and of a whole one
        self._held = [[0] * micro_batches for _ in self._own]
        self._total = [0] * ticks.ranks
        self._whole = [sum(max(0, blocks[n].held) for n in own) for own in self._own]

    def order(self) -> tuple[int, Rows]:
        """When it ends, reductions included as if they did not wait, and the rows."""
        rows: list[list[Action]] = [[] for _ in self._own]
        choices = [self._choice(rank) for rank in range(len(rows))]
        moments = [(choice[0], rank) for rank, choice in enumerate(choices)]
        heapq.heapify(moments)
        end = 0
        while moments:
            start, rank = heapq.heappop(moments)
            n = choices[rank][2]
            # A rank may have changed its mind since.
            if n < 0 or choices[rank][0] != start:
                continue
            block, micro_batch = self._blocks[n], self._next[n]
            rows[rank].append(block.of(micro_batch))
            self._next[n] += 1
            over = self._free[rank] = int(start) + block.duration
            end = max(end, over + (self._reductions[block.stage] if block.held <= 0 else 0))
            self._held[rank][micro_batch] += block.held
            self._total[rank] += block.held
            changed = {rank}
            for after, gap in self._needed_by[n]:
                self._missing[after][micro_batch] -= 1
                arrived = self._arrived[after]
                arrived[micro_batch] = max(arrived[micro_batch], over + gap)
                changed.add(self._blocks[after].rank)
            for other in changed:
                choices[other] = self._choice(other)
                heapq.heappush(moments, (choices[other][0], other))
        return end, tuple(map(tuple, rows))

    def _choice(self, rank: int) -> tuple[float, float, int]:
        """When a rank goes on, how urgent that is, and with which block; below 0: with none."""
        best = (math.inf, math.inf, -1)
        for n in self._own[rank]:
            micro_batch = self._next[n]
            if micro_batch == self._micro_batches or self._missing[n][micro_batch]:
                continue
            start = max(self._free[rank], self._arrived[n][micro_batch])
            choice = (start, self._urgency[n] + self._age * micro_batch, n)
            if choice < best or best[2] < 0:
                block = self._blocks[n]
                if block.held <= 0 or self._fits(block, micro_batch):
                    best = choice
        return best

    def _fits(self, block: Block, micro_batch: int) -> bool:
        """Whether a forward leaves room for the first micro-batch that has forwards to do here."""
        rank = block.rank
        if self._total[rank] + block.held > self._memory_bytes:
            return False
        first = min(self._next[n] for n in self._own[rank] if self._blocks[n].kind is Kind.FORWARD)
        if micro_batch == first:
            return True
        younger = sum(self._held[rank][first + 1 :])
        return younger + block.held + self._whole[rank] <= self._memory_bytes
