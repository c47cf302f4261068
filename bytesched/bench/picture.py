"""The picture of a benchmark: iteration times of every system, case by case, beside T*."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bytesched.bench.table import chosen
from bytesched.report.canvas import AFTER, BEFORE, GRID, INK, QUIET, canvas, say, strip

OPTIMUM = "#d64545"
PANEL_IN = 6.6
BAR_IN = 0.45
HEAD_IN = 1.25


def draw_bench(results: str | Path | Sequence[str | Path], out_png: str | Path) -> None:
    """Draw one or several results that ``bytesched bench --json`` wrote, a panel for each, as PNG.

    Raises ``PluginError`` without matplotlib, ``ValueError`` if a file holds no result of the
    bench, and ``OSError`` if one cannot be read or written.
    """
    paths = [results] if isinstance(results, str | Path) else results
    cases = [_read(Path(path)) for path in paths]
    columns = min(2, len(cases))
    rows = math.ceil(len(cases) / columns)
    bars = max(len(case["systems"]) for case in cases)
    height_in = rows * (HEAD_IN + BAR_IN * bars)
    with canvas(PANEL_IN * columns, height_in, Path(out_png)) as figure:
        figure.set_layout_engine("constrained", w_pad=0.15, h_pad=0.12)
        panels = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axes in panels:
            axes.set_axis_off()
        for axes, case in zip(panels, cases, strict=False):
            axes.set_axis_on()
            _draw_case(axes, case, bars)


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


def _draw_case(axes: Any, case: dict[str, Any], bars: int) -> None:
    systems: dict[str, Any] = case["systems"]
    optimum_ms = float(case["compute"]["optimum_ms"])
    longest_ms = max(float(system["figures"]["iteration_ms"]) for system in systems.values())
    width_ms = 1.2 * max(longest_ms, optimum_ms)
    axes.set_xlim(0, width_ms)
    # Bars are equally thick in all panels.
    axes.set_ylim(bars - 0.5, -0.75)
    strip(axes)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.locator_params(axis="x", nbins=5)
    axes.xaxis.set_major_formatter("{x:.0f} ms")
    axes.set_yticks(range(len(systems)), [_label(*item) for item in systems.items()])
    axes.tick_params(axis="y", labelcolor=INK, labelsize=9)
    for row, (name, system) in enumerate(systems.items()):
        _draw_bar(axes, row, name, system["figures"], optimum_ms)
    axes.plot([optimum_ms] * 2, [-0.62, len(systems) - 0.5], color=OPTIMUM, linewidth=1.4)
    say(axes, f"T* {optimum_ms:.0f} ms", (optimum_ms, -0.62), (4, -2), color=OPTIMUM, va="center")
    title = str(case.get("workload", ""))
    axes.set_title(title, loc="left", size=12, weight="bold", color=INK, pad=22)
    place = {"xycoords": "axes fraction", "va": "baseline"}
    say(axes, _circumstances(case), (0, 1), (0, 8), color=QUIET, **place)


def _draw_bar(axes: Any, row: int, name: str, figures: dict[str, Any], optimum_ms: float) -> None:
    length_ms = float(figures["iteration_ms"])
    quartiles_ms = [float(figures.get(f"{q}_quartile_ms", length_ms)) for q in ("first", "third")]
    axes.barh(row, length_ms, height=0.66, color=AFTER if name.startswith("bytesched") else BEFORE)
    axes.plot(quartiles_ms, [row, row], color=INK, linewidth=1.2, solid_capstyle="butt")
    inside = {"size": 10, "weight": "bold", "color": "white", "va": "center"}
    say(axes, f"{length_ms:.0f} ms", (0, row), (7, 0), **inside)
    beside = max(length_ms, quartiles_ms[1]), row
    say(axes, f"{length_ms / optimum_ms:.2f} x T*", beside, (6, 0), color=INK, va="center")


def _label(name: str, system: dict[str, Any]) -> str:
    """Return the name with its options below it."""
    kind, _, options = name.partition(":")
    options = chosen(system) or options
    return "\n".join([kind, *options.split("+")]) if options else kind


def _circumstances(case: dict[str, Any]) -> str:
    facts = []
    if "model_bytes" in case["compute"]:
        facts.append(f"{float(case['compute']['model_bytes']) / 1e6:.1f} MB of gradients")
    if "world_size" in case:
        facts.append(f"{case['world_size']} ranks")
    return ", ".join([*facts, str(case.get("network", ""))])
