"""A program on paper: when each operator runs, and what each rank remembers meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from bytesched.errors import ConfigError
from bytesched.ir.program import Held, Lane, Operator, Program, Transfer
from bytesched.link.fabric import ALGORITHMS


class CyclicPlanError(ConfigError):
    """Operators of a plan wait for each other in a circle."""


@dataclass(frozen=True)
class Link:
    """That of each rank, which sends and receives at once."""

    bytes_per_s: float
    latency_s: float = 0.0

    def seconds(self, transfer: Transfer) -> float:
        """How long a transfer takes alone: collectives go round a ring."""
        ring, ranks = ALGORITHMS["ring"], len(transfer.ranks)
        rounds = {"all_reduce": 1.0, "all_gather": 0.5, "reduce_scatter": 0.5}.get(transfer.kind)
        if rounds is None:
            return self.latency_s + transfer.nbytes / self.bytes_per_s
        sent = rounds * ring.bytes_per_byte(ranks) * transfer.nbytes
        return rounds * ring.messages(ranks) * self.latency_s + sent / self.bytes_per_s


@dataclass(frozen=True)
class Span:
    """When an operator runs."""

    start_s: float
    end_s: float


@dataclass(frozen=True)
class Peak:
    """The most that a rank remembers, and the operator that has just started then."""

    nbytes: int
    at_s: float
    operator: str


@dataclass(frozen=True)
class Replayed:
    """A program that has run on paper."""

    #: by operator
    spans: Mapping[str, Span]
    #: by rank
    peaks: Mapping[int, Peak]

    @property
    def makespan_s(self) -> float:
        """The end of the last operator."""
        return max((span.end_s for span in self.spans.values()), default=0.0)


def dependencies(program: Program, lanes: Iterable[str]) -> dict[str, set[str]]:
    """What each operator waits for: who writes what it reads, and who is before it in a lane.

    Args:
        lanes: which kinds of lane do one thing at a time: ``compute``, ``out``, ``in``.
    """
    waits: dict[str, set[str]] = {
        operator.name: {
            writer for held in operator.takes for writer in program.writers.get(held, ())
        }
        for operator in program.operators
    }
    kinds = set(lanes)
    for rank, names in program.orders.items():
        queues: dict[Lane, list[str]] = {}
        for name in names:
            for lane in program.named[name].lanes:
                if lane.rank == rank and lane.of in kinds:
                    queues.setdefault(lane, []).append(name)
        for queue in queues.values():
            for before, after in pairwise(queue):
                waits[after].add(before)
    return waits


def replay(
    program: Program, link: Link, lanes: Iterable[str] = ("compute", "out", "in")
) -> Replayed:
    """Run a program: each lane does one thing at a time, in the order of its rank.

    Args:
        lanes: see `dependencies`; without ``out`` and ``in``, transfers do not wait for each other.

    Raises `CyclicPlanError` if operators wait for each other in a circle.
    """
    waits = dependencies(program, lanes)
    try:
        in_turn = tuple(
            TopologicalSorter({name: sorted(waits[name]) for name in waits}).static_order()
        )
    except CycleError as error:
        circle = " waits for ".join(reversed(error.args[1]))
        raise CyclicPlanError(f"the plan cannot end: {circle}; change an order") from None
    spans: dict[str, Span] = {}
    for name in in_turn:
        operator = program.named[name]
        start_s = max((spans[before].end_s for before in waits[name]), default=0.0)
        taken_s = operator.seconds if isinstance(operator, Operator) else link.seconds(operator)
        spans[name] = Span(start_s, start_s + taken_s)
    return Replayed(spans, _peaks(program, spans, in_turn))


def _peaks(
    program: Program, spans: Mapping[str, Span], in_turn: tuple[str, ...]
) -> dict[int, Peak]:
    """A piece is remembered from when it is first written until it was last read.

    Sums are made where their summands are. Weights are there all the time.
    """
    turn = {name: index for index, name in enumerate(in_turn)}
    weights: set[Held] = set()
    firsts: dict[Held, str] = {}
    lasts: dict[Held, str] = {}
    for name in sorted(spans, key=lambda name: (spans[name].start_s, turn[name])):
        for rank, piece in program.named[name].gives:
            firsts.setdefault(Held(rank, piece.region), name)
    for name in sorted(spans, key=lambda name: (spans[name].end_s, turn[name])):
        operator = program.named[name]
        for rank, piece in (*operator.takes, *operator.gives):
            buffer = Held(rank, piece.region)
            if buffer in firsts:
                lasts[buffer] = name
            elif piece.tensor.what == "weight":
                weights.add(buffer)
    # What follows at the same moment comes later in turn, so that memory is handed on.
    changes: list[tuple[float, int, int, int, int]] = []

    def lives(rank: int, nbytes: int, first: str, last: str) -> None:
        changes.append((spans[first].start_s, turn[first], 0, rank, nbytes))
        changes.append((spans[last].end_s, turn[last], 1, rank, -nbytes))

    for buffer, first in firsts.items():
        lives(buffer.rank, program.nbytes(buffer.piece), first, lasts[buffer])
    for operator in program.computes:
        lives(operator.rank, operator.workspace_bytes, operator.name, operator.name)
    used = dict.fromkeys(program.orders, 0)
    for rank, piece in weights:
        used[rank] += program.nbytes(piece)
    peaks = {rank: Peak(nbytes, 0.0, "") for rank, nbytes in used.items()}
    for at_s, index, _, rank, nbytes in sorted(changes):
        used[rank] += nbytes
        if used[rank] > peaks[rank].nbytes:
            peaks[rank] = Peak(used[rank], at_s, in_turn[index])
    return peaks
