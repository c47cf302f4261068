"""The grid: how gradients travel, and which ways of it go together.

One table says what cannot be, and why. Whoever is asked for it raises `refusal`; the documents show
`as_markdown`, and one test trains in every other cell.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Final, NamedTuple

from bytesched.errors import ConfigError

__all__ = ["Cell", "as_markdown", "cells", "refusal", "why_not"]

CARRIED: Final = ("whole", "split", "sharded")
LEVELS: Final = ("flat", "two levels")
SIZES: Final = ("given", "tuned")

#: the setting that asks for it
_SETTINGS: Final = {
    "split": "split = 'on'",
    "sharded": "shard = True",
    "two levels": "hierarchy = 'on'",
    "tuned": "tune = True",
}

#: What does not go together, and why.
_IMPOSSIBLE: Final = {
    ("split", "two levels"): (
        "gradients go in two halves between two ranks, which are two hosts or one"
    ),
    ("split", "tuned"): "sizes that are tuned are those of whole all-reduces",
    ("sharded", "two levels"): (
        "sums go to their owners, and parameters from them, between all ranks at once, so that no "
        "host sums first"
    ),
    ("sharded", "tuned"): (
        "with other sizes other ranks would own a parameter, and the optimizer's state of it would "
        "have to move"
    ),
}


class Cell(NamedTuple):
    """One way for gradients."""

    carried: str = "whole"
    levels: str = "flat"
    sizes: str = "given"


def cells() -> Iterator[Cell]:
    """All of them."""
    return map(Cell._make, product(CARRIED, LEVELS, SIZES))


def why_not(cell: Cell) -> str:
    """Why gradients cannot travel so; empty if they can."""
    found = _conflict(cell)
    return "" if found is None else _IMPOSSIBLE[found]


def refusal(cell: Cell) -> ConfigError | None:
    """The error of whoever is asked for ``cell``; None if it works."""
    found = _conflict(cell)
    if found is None:
        return None
    one, other = (_SETTINGS[name] for name in found)
    return ConfigError(
        f"{one} and {other}: {_IMPOSSIBLE[found]}; leave one of the two settings as it is"
    )


def as_markdown() -> str:
    """The table of all cells, with the reasons below it."""
    reasons = list(dict.fromkeys(filter(None, map(why_not, cells()))))
    lines = [
        "| | " + " | ".join(f"sizes {sizes}" for sizes in SIZES) + " |",
        "|---|" + "---|" * len(SIZES),
    ]
    for carried, levels in product(CARRIED, LEVELS):
        found = [why_not(Cell(carried, levels, sizes)) for sizes in SIZES]
        shown = [f"no ({1 + reasons.index(why)})" if why else "works" for why in found]
        lines.append(f"| {carried}, {levels} | " + " | ".join(shown) + " |")
    lines.append("")
    lines += [f"{number}. {why[0].upper()}{why[1:]}." for number, why in enumerate(reasons, 1)]
    return "\n".join(lines)


def _conflict(cell: Cell) -> tuple[str, str] | None:
    return next((pair for pair in _IMPOSSIBLE if set(pair) <= set(cell)), None)
