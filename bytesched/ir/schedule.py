"""The second phase: each operator gets a rank, and each rank an order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from bytesched.errors import ConfigError
from bytesched.ir.program import Operator, Program

__all__ = ["grid", "order", "place"]


def place(program: Program, rank_of: Callable[[Operator], int]) -> Program:
    """A program whose operators are on the ranks that ``rank_of`` gives, in program order.

    Raises `ConfigError` if a rank is negative.
    """
    placed = []
    for operator in program.computes:
        rank = rank_of(operator)
        if rank < 0:
            raise ConfigError(f"{operator.name}: rank {rank}; ranks are numbered from 0")
        placed.append(replace(operator, rank=rank))
    return order(Program(program.layers, tuple(placed)), lambda _: 0)


def grid(program: Program, labels: Sequence[str]) -> Callable[[Operator], int]:
    """Ranks of a grid whose dimensions are splits, the last one counting fastest."""
    sizes = {part.label: part.share.of for operator in program.computes for part in operator.parts}

    def rank_of(operator: Operator) -> int:
        rank = 0
        for label in labels:
            rank = rank * sizes[label] + operator.at(label)
        return rank

    for label in labels:
        if label not in sizes:
            raise ConfigError(f"no layer has a split {label!r}; known: {', '.join(sizes)}")
    return rank_of


def order(program: Program, key: Callable[[Operator], Any]) -> Program:
    """A program in which each rank computes in the order of a key; equals stay as they are.

    It is ordered before `preserve`, which puts communication between.
    """
    orders: dict[int, list[str]] = {}
    for operator in sorted(program.computes, key=key):
        orders.setdefault(operator.rank, []).append(operator.name)
    return replace(program, orders={rank: tuple(orders[rank]) for rank in sorted(orders)})
