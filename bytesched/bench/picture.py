"""The picture of a benchmark: iteration times of every system, case by case, beside T*."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bytesched.bench.table import chosen
from bytesched.report.canvas import AFTER, BEFORE, GRID, INK, QUIET, canvas, say, strip

OPTIMUM: Final = "#d64545"
PANEL_IN, BAR_IN, HEAD_IN = 6.6, 0.45, 1.25


def draw_bench(results: str | Path | Sequence[str | Path], out_png: str | Path) -> None:
    """Draw one or several results that ``bytesched bench --json`` wrote, a panel for each, as PNG.

    Raises ``PluginError`` without matplotlib, ``ValueError`` if a file holds no result of the
    bench, and ``OSError`` if one cannot be read or written.
    """
    paths = [results] if isinstance(results, str | Path) else results
    cases = [_read(Path(path)) for path in paths]
    columns = min(2, len(cases))
    rows = math.ceil(len(cases) / columns)
    # Bars are equally thick in all panels.
    bars = max(len(case["systems"]) for case in cases)
    height_in = rows * (HEAD_IN + BAR_IN * bars)
    with canvas(PANEL_IN * columns, height_in, Path(out_png)) as figure:
        figure.set_layout_engine("constrained", w_pad=0.15, h_pad=0.12)
        panels = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axes, case in zip(panels, cases, strict=False):
            _draw(axes, case, bars)
        for axes in panels[len(cases) :]:
            axes.set_axis_off()


def _read(path: Path) -> dict[str, Any]:
    try:
        case: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for system in case["systems"].values():
            float(system["figures"]["iteration_ms"])
        float(case["compute"]["optimum_ms"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not a result of bytesched bench --json") from error
    if not case["systems"]:
        raise ValueError(f"{path}: holds no system")
    return case


def _draw(axes: Any, case: dict[str, Any], bars: int) -> None:
    systems, optimum_ms = case["systems"], float(case["compute"]["optimum_ms"])
    times_ms = [float(system["figures"]["iteration_ms"]) for system in systems.values()]
    axes.set_xlim(0, 1.2 * max(*times_ms, optimum_ms))
    axes.set_ylim(bars - 0.5, -0.75)
    strip(axes)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.locator_params(axis="x", nbins=5)
    axes.xaxis.set_major_formatter("{x:.0f} ms")
    axes.set_yticks(range(len(systems)), [_label(*item) for item in systems.items()])
    axes.tick_params(axis="y", labelcolor=INK, labelsize=9)
    for row, (name, system) in enumerate(systems.items()):
        ms, figures = times_ms[row], system["figures"]
        low_ms, high_ms = (float(figures.get(f"{q}_quartile_ms", ms)) for q in ("first", "third"))
        is_ours = name.startswith("bytesched")
        axes.barh(row, ms, height=0.66, color=AFTER if is_ours else BEFORE)
        axes.plot([low_ms, high_ms], [row, row], color=INK, linewidth=1.2, solid_capstyle="butt")
        inside = {"size": 10, "weight": "bold", "color": "white", "va": "center"}
        say(axes, f"{ms:.0f} ms", (0, row), (7, 0), **inside)
        beside = f"{ms / optimum_ms:.2f} x T*"
        say(axes, beside, (max(ms, high_ms), row), (6, 0), color=INK, va="center")
    axes.plot([optimum_ms] * 2, [-0.62, len(systems) - 0.5], color=OPTIMUM, linewidth=1.4)
    say(axes, f"T* {optimum_ms:.0f} ms", (optimum_ms, -0.62), (4, -2), color=OPTIMUM, va="center")
    title = str(case.get("workload", ""))
    axes.set_title(title, loc="left", size=12, weight="bold", color=INK, pad=22)
    nbytes = case["compute"].get("model_bytes", 0)
    facts = f"{nbytes / 1e6:.1f} MB of gradients, {case.get('world_size', '?')} ranks"
    place = {"xycoords": "axes fraction", "va": "baseline"}
    say(axes, f"{facts}, {case.get('network', '')}", (0, 1), (0, 8), color=QUIET, **place)


def _label(name: str, system: dict[str, Any]) -> str:
    """The name with its options below it."""
    kind, _, options = name.partition(":")
    options = chosen(system) or options
    return "\n".join([kind, *options.split("+")]) if options else kind
