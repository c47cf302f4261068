"""What would make a plan hang, compute something else, or not fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import combinations

from bytesched.errors import ConfigError
from bytesched.ir.program import Held, Operator, Program, Transfer, covered
from bytesched.ir.replay import Link, Replayed, replay


class LayoutError(ConfigError):
    """An operator of a plan reads a piece that its rank does not have."""


class CollectiveOrderError(ConfigError):
    """Ranks of a plan begin collectives in different orders."""


class MemoryLimitError(ConfigError):
    """A rank of a plan needs more memory than it has."""


def check(program: Program, link: Link, memory_bytes: Mapping[int, int] | None = None) -> Replayed:
    """The program as it runs on such links.

    Args:
        memory_bytes: of each rank that has a limit.

    Raises `LayoutError`, `CollectiveOrderError`, `CyclicPlanError` or `MemoryLimitError`, and
    `ConfigError` if orders do not name each operator once.
    """
    _named_once(program)
    for operator in program.operators:
        _layouts(program, operator)
    _collectives(program)
    replayed = replay(program, link)
    for rank, limit in (memory_bytes or {}).items():
        peak = replayed.peaks.get(rank)
        if peak is not None and peak.nbytes > limit:
            raise MemoryLimitError(
                f"rank {rank} needs {peak.nbytes} bytes at {peak.at_s:.6g} s, when "
                f"{peak.operator or 'it starts'} begins, and has {limit}; split layers further, or "
                "begin fewer micro-batches before their backward"
            )
    return replayed


def _named_once(program: Program) -> None:
    names = Counter(operator.name for operator in program.operators)
    for name, count in names.items():
        if count > 1:
            raise ConfigError(f"{count} operators are called {name!r}; names tell them apart")
    for rank in {rank for operator in program.operators for rank in operator.ranks}:
        order = Counter(program.orders.get(rank, ()))
        expected = Counter(
            operator.name
            for operator in program.operators
            if operator.lanes and rank in operator.ranks
        )
        if order != expected:
            name = next(iter((expected - order) + (order - expected)))
            raise ConfigError(
                f"the order of rank {rank} has {name!r} {order[name]} times, expected "
                f"{expected[name]} times"
            )


def _layouts(program: Program, operator: Operator | Transfer) -> None:
    for held in operator.takes:
        tensor = held.piece.tensor
        writers = program.writers.get(held, [])
        is_weight = tensor.what == "weight" and not tensor.is_gradient
        if len(writers) != 1 and not (is_weight and not writers):
            wrote = (
                f"{len(writers)} operators write it there" if writers else _elsewhere(program, held)
            )
            raise LayoutError(f"{operator.name} reads {held.piece} on rank {held.rank}: {wrote}")
    if isinstance(operator, Transfer) or not operator.lanes:
        sources = [held.piece for held in operator.takes]
        for rank, piece in operator.gives:
            if not covered(piece, sources):
                raise LayoutError(
                    f"{operator.name} gives rank {rank} {piece}, but takes only "
                    f"{', '.join(map(str, sources))}"
                )


def _elsewhere(program: Program, held: Held) -> str:
    others = [
        f"{other.piece} on rank {other.rank}"
        for other in program.writers
        if other.piece.tensor == held.piece.tensor
    ]
    return f"nobody writes it there; there is {', '.join(others[:4]) or 'nothing of it'}"


def _collectives(program: Program) -> None:
    collectives = {each.name: each for each in program.transfers if each.kind != "send"}
    orders = {
        rank: [name for name in names if name in collectives]
        for rank, names in program.orders.items()
    }
    for one, other in combinations(orders, 2):
        mine = [name for name in orders[one] if other in collectives[name].ranks]
        theirs = [name for name in orders[other] if one in collectives[name].ranks]
        for name, their_name in zip(mine, theirs, strict=True):
            if name != their_name:
                raise CollectiveOrderError(
                    f"rank {one} begins {name!r} where rank {other} begins {their_name!r}; ranks "
                    "of a group wait for each other, so give both one order"
                )
