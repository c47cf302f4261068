"""Pictures: systems along an axis, and where it pays over bandwidth and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bytesched.report.canvas import AFTER, BEFORE, GRID, INK, QUIET, canvas, strip
from bytesched.sim.curve import AXES, Axis, Case
from bytesched.sim.predict import Prediction
from bytesched.sim.verdict import gain

__all__ = ["draw_map", "draw_sweep"]

_MAP_RANKS = (2, 4, 8, 16, 32, 64, 128, 256)
#: gains that are drawn as no colour and as all of it
_NOTHING, _MUCH = 1.0, 1.5


def draw_sweep(
    case: Case, axis: Axis, found: Sequence[tuple[float, Sequence[Prediction]]], path: Path
) -> None:
    """Draw each system's multiple of T* along an axis, as PNG.

    Raises ``PluginError`` without matplotlib and ``OSError`` if the file cannot be written.
    """
    with canvas(7.5, 4.2, path) as figure:
        figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)
        axes = figure.subplots()
        _frame(axes, axis.title)
        axes.set_ylabel("x T*", color=QUIET, size=9)
        for number, system in enumerate(case.systems):
            ours = system.kind == "bytesched"
            axes.plot(
                [point for point, _ in found],
                [of_point[number].to_optimum for _, of_point in found],
                color=AFTER if ours else BEFORE,
                linestyle=("-", "--", ":", "-.")[number % 4],
                linewidth=1.6,
                marker=".",
                label=system.label,
            )
        axes.set_xscale("log")
        axes.set_xticks(list(axis.points), [f"{point:g}" for point in axis.points])
        axes.minorticks_off()
        axes.legend(frameon=False, fontsize=8, labelcolor=INK)
        _title(axes, case)


def draw_map(case: Case, path: Path) -> None:
    """Draw how many times as fast as the best of the others ours is, over bandwidth and ranks.

    Raises as `draw_sweep` does.
    """
    bandwidths = AXES["bandwidth"].points
    gains = [
        [gain(case.with_ranks(ranks).with_bandwidth(gbit).predictions()) for gbit in bandwidths]
        for ranks in _MAP_RANKS
    ]
    with canvas(8.0, 4.6, path) as figure:
        figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)
        axes = figure.subplots()
        _frame(axes, AXES["bandwidth"].title)
        axes.imshow(gains, cmap="Greens", vmin=_NOTHING, vmax=_MUCH, aspect="auto", origin="lower")
        for row, of_ranks in enumerate(gains):
            for column, times in enumerate(of_ranks):
                dark = times > (_NOTHING + _MUCH) / 2
                colour = "white" if dark else INK
                text = f"{times:.2f}"
                axes.text(column, row, text, ha="center", va="center", size=8, color=colour)
        axes.set_xticks(range(len(bandwidths)), [f"{gbit:g}" for gbit in bandwidths])
        axes.set_yticks(range(len(_MAP_RANKS)), [str(ranks) for ranks in _MAP_RANKS])
        axes.set_ylabel("ranks", color=QUIET, size=9)
        axes.grid(visible=False)
        _title(axes, case)


def _frame(axes: Any, title: str) -> None:
    strip(axes)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_xlabel(title, color=QUIET, size=9)


def _title(axes: Any, case: Case) -> None:
    profile = case.model.profile
    text = f"{profile.name}, {profile.nbytes / 1e6:.0f} MB, {1e3 * profile.compute_s:.0f} ms"
    axes.set_title(text, loc="left", size=12, weight="bold", color=INK)
