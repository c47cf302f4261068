"""The picture of a tuning: the settings that were tried, and the time of every step."""

from __future__ import annotations

import base64
import html
import math
import tempfile
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from bytesched.files import write_text
from bytesched.report.canvas import AFTER, BEFORE, GRID, INK, QUIET, canvas, strip
from bytesched.report.pictures import PICTURES, Picture

from .file import Trial, TuningFile

__all__ = ["draw_tuning"]

WIDTH_IN, HEIGHT_IN = 10.0, 7.2
MIB = 2**20
PHASES = {"baseline": BEFORE, "search": "#4c78a8", "guard": "#d9a441", "watch": AFTER}
PAGE = """<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><title>bytesched tuning</title>
<style>body{{font:15px/1.5 sans-serif;color:#1f2933;margin:2em auto;max-width:60em}}
td,th{{padding:.15em 1em .15em 0;text-align:left}}img{{width:100%}}</style>
<h1>Tuning</h1><p>{head}</p>
<img alt="settings tried and step times" src="data:image/png;base64,{picture}">
<table><tr><th>phase</th><th>setting</th><th>step, ms</th><th>steps</th></tr>
{rows}</table></html>
"""


def draw_tuning(file: str | Path, output: str | Path) -> None:
    """Draw a tuning file, as one page if `output` ends in .html, else as PNG.

    Raises ``PluginError`` without matplotlib, ``ValueError`` if the file is no tuning, and
    ``OSError`` if one cannot be read or written.
    """
    source, target = Path(file), Path(output)
    try:
        tuning = TuningFile.read(source)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    if not any(trial.step_ms > 0 for trial in tuning.trials):
        raise ValueError(f"{source}: nothing was measured yet")
    if target.suffix != ".html":
        _draw(tuning, target)
        return
    with tempfile.TemporaryDirectory(prefix="bytesched-report-") as folder:
        picture = Path(folder, "tuning.png")
        _draw(tuning, picture)
        page = _page(tuning, picture.read_bytes())
    write_text(target, page)


def _draw(tuning: TuningFile, path: Path) -> None:
    with canvas(WIDTH_IN, HEIGHT_IN, path) as figure:
        figure.set_layout_engine("constrained")
        surface, history = figure.subplots(2, 1, height_ratios=(3, 2))
        _draw_surface(figure, surface, tuning)
        _draw_history(history, tuning)


def _draw_surface(figure: Any, axes: Any, tuning: TuningFile) -> None:
    tried = [
        trial
        for trial in tuning.trials
        if trial.phase in ("baseline", "search") and trial.step_ms > 0 and trial.setting.enabled
    ]
    strip(axes)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.grid(color=GRID)
    points = axes.scatter(
        [trial.setting.partition_bytes / MIB for trial in tried],
        [trial.setting.credit_bytes / MIB for trial in tried],
        c=[trial.step_ms for trial in tried],
        cmap="viridis_r",
        s=90,
        marker="o",
        edgecolors="white",
    )
    figure.colorbar(points, ax=axes, label="step, ms")
    for setting, name, colour in (
        (tuning.untuned, "untuned", BEFORE),
        (tuning.setting, "adopted", AFTER),
    ):
        if setting is not None and setting.enabled:
            at = (setting.partition_bytes / MIB, setting.credit_bytes / MIB)
            axes.scatter(*at, s=260, facecolors="none", edgecolors=colour, linewidths=2)
            axes.annotate(
                name, at, xytext=(10, 10), textcoords="offset points", color=INK, fontsize=9
            )
    axes.set_xlabel("partition, MiB", color=QUIET)
    axes.set_ylabel("credit, MiB", color=QUIET)
    axes.set_title(_head(tuning), color=INK, loc="left", fontsize=11)


def _draw_history(axes: Any, tuning: TuningFile) -> None:
    strip(axes)
    axes.grid(axis="y", color=GRID)
    step = 0
    seen = set()
    for trial in tuning.trials:
        label = trial.phase if trial.phase not in seen else None
        seen.add(trial.phase)
        steps = range(step, step + len(trial.durations_ms))
        colour = PHASES.get(trial.phase, QUIET)
        axes.scatter(steps, trial.durations_ms, s=8, color=colour, label=label)
        step += len(trial.durations_ms)
    ordinary = sorted(value for trial in tuning.trials for value in trial.durations_ms)
    if ordinary:
        # An evaluation among the steps shall not flatten all others.
        axes.set_ylim(0, 1.15 * ordinary[int(0.97 * (len(ordinary) - 1))])
    axes.set_xlabel("measured steps", color=QUIET)
    axes.set_ylabel("ms", color=QUIET)
    axes.legend(frameon=False, fontsize=9, loc="lower right", ncols=4)


def _head(tuning: TuningFile) -> str:
    fingerprint = tuning.fingerprint
    where = f"{fingerprint.world_size} ranks, {fingerprint.bytes_per_s / 1e6:.0f} MB/s"
    if tuning.setting is None:
        return f"{where}: not finished after {tuning.steps} steps"
    gain = f", {tuning.gain_pct:.1f} % gained" if math.isfinite(tuning.gain_pct) else ""
    return f"{where}: {tuning.setting} after {tuning.steps} steps{gain}"


def _page(tuning: TuningFile, picture: bytes) -> str:
    rows = "\n".join(_row(trial) for trial in tuning.trials if trial.phase != "watch")
    return PAGE.format(
        head=html.escape(_head(tuning)), picture=base64.b64encode(picture).decode(), rows=rows
    )


def _row(trial: Trial) -> str:
    took = f"{trial.step_ms:.1f}" if math.isfinite(trial.step_ms) else "&ndash;"
    cells = (html.escape(trial.phase), html.escape(str(trial.setting)), took)
    counted = f"{len(trial.durations_ms)}{' (cut short)' if trial.cut else ''}"
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in (*cells, counted)) + "</tr>"


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="TUNING.json")


PICTURES["tuning"] = Picture(
    "what a tuning tried; OUT.html: one whole page",
    _arguments,
    lambda options: draw_tuning(options.file, options.output),
)
