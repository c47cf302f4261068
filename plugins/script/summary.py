"""What came of a script, in a line for its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["summary"]

Figures = Mapping[str, int | float | str]


def summary(ended: Sequence[Figures], left: Sequence[str]) -> list[str]:
    """A line for each model that was wrapped, or for all that were not.

    Args:
        ended: the figures of those that were.
        left: why others were left as they were.
    """
    lines = [_line(figures) for figures in ended if figures.get("steps")]
    if not lines and left:
        lines = [f"mode plain: {'; '.join(left)}"]
    return lines


def _line(figures: Figures) -> str:
    line = (
        f"mode {figures['mode']}: {figures['barrier_crossed_pct']:.0f} % of the bytes crossed the "
        f"barrier, {figures['exposed_comm_ms']:.1f} ms waited per step, {figures['steps']} steps"
    )
    reason = figures.get("reason")
    return f"{line}: {reason}" if reason else line
