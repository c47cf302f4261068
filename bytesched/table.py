"""The one table printer of all commands."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["aligned"]


def aligned(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Lines with columns as wide as their widest cells, two blanks apart.

    ``sides`` has a "<" or ">" for each column: the side to which its cells are moved.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)
        ).rstrip()
        for row in rows
    ]
