"""The first phases: operators are split, forward with backward and update; then put on ranks.

`split` is the first; `place` and `order` are the second, in which each operator gets a rank, and
each rank an order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from bytesched.errors import ConfigError
from bytesched.ir.program import Axis, Operator, Part, Piece, Program, Share
from bytesched.values import nearest


class _Way(NamedTuple):
    """Which axis of each tensor is split; None: every part needs, or has, all of it."""

    input: Axis | None
    output: Axis | None
    weight: Axis | None
    output_gradient: Axis | None
    input_gradient: Axis | None
    weight_gradient: Axis | None


#: Where forward reads a whole tensor to compute a part, backward gives a summand of its gradient;
#: where forward gives a summand, backward reads the whole gradient.
_WAYS: Final = {
    "batch": _Way("rows", "rows", None, "rows", "rows", "summand"),
    "micro": _Way("rows", "rows", None, "rows", "rows", "summand"),
    "column": _Way(None, "columns", "columns", "columns", "summand", "columns"),
    "row": _Way("columns", "summand", "columns", None, "columns", "columns"),
    "feature": _Way("columns", "columns", "columns", "columns", "columns", "columns"),
    "copy": _Way(None, None, None, None, None, None),
}
#: a loss is computed of whole rows
_OF_LOSSES: Final = ("batch", "micro", "copy")


def split(program: Program, layer: str, way: str, ways: int, label: str) -> Program:
    """A program in which a layer consists of ``ways`` parts.

    Args:
        way: ``batch``, by samples (data parallel); ``micro``, by samples, one after the other on
            the same ranks, which update once; ``column``, by output features; ``row``, by input
            features, whose outputs are summed; ``feature``, of layers that compute each feature,
            or head, by itself; ``copy``: every part computes everything.
        label: names this split for `place`; the same for all layers that
            are split among the same ranks.

    Layers that are split differently may be neighbours: `bytesched.ir.preserve` joins them. Raises
    `ConfigError` if the layer cannot be split so.
    """
    limits = program.layer(layer)
    if way not in _WAYS:
        raise ConfigError(f"layer {layer!r}: no way {way!r} to split{nearest(way, _WAYS)}")
    if ways < 1:
        raise ConfigError(f"layer {layer!r}: {ways} parts; at least 1")
    if way not in limits.ways:
        known = ", ".join(sorted(limits.ways))
        raise ConfigError(f"layer {layer!r} cannot be split by {way!r}, but by {known}")
    if way not in _OF_LOSSES and not any(layer in x.inputs for x in program.layers.values()):
        raise ConfigError(
            f"layer {layer!r} computes the loss, which needs whole rows: split it by "
            f"{' or '.join(_OF_LOSSES)}, not by {way!r}"
        )
    operators: list[Operator] = []
    for operator in program.operators:
        if not isinstance(operator, Operator) or operator.rank >= 0:
            raise ConfigError(f"{operator.name} has its rank already; split first, then place")
        if operator.layer != layer or (way == "micro" and operator.phase == "U"):
            operators.append(operator)
            continue
        if any(part.label == label for part in operator.parts):
            raise ConfigError(f"layer {layer!r} has a split {label!r} already")
        operators += [_part(operator, way, label, Share(i, ways)) for i in range(ways)]
    return Program(program.layers, tuple(operators))


def _part(operator: Operator, way: str, label: str, share: Share) -> Operator:
    done = 1 if way == "copy" or operator.phase == "U" else share.of
    return replace(
        operator,
        name=f"{operator.name} {label}{share.index}",
        seconds=operator.seconds / done,
        workspace_bytes=-(-operator.workspace_bytes // done),
        reads=tuple(_piece(operator, _WAYS[way], piece, share) for piece in operator.reads),
        writes=tuple(_piece(operator, _WAYS[way], piece, share) for piece in operator.writes),
        parts=(*operator.parts, Part(label, way, share)),
    )


def _piece(operator: Operator, way: _Way, piece: Piece, share: Share) -> Piece:
    tensor = piece.tensor
    role: str = tensor.what
    if role == "output" and tensor.layer != operator.layer:
        role = "input"
    if operator.phase == "U":
        # It reads sums, of the weights that it has.
        axis = way.weight
    else:
        axis = getattr(way, f"{role}_gradient" if tensor.is_gradient else role)
    return piece if axis is None else piece.part(axis, share.index, share.of)


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
