"""Pictures: what is read from the traces, and that a whole PNG comes out or nothing."""

from __future__ import annotations

import builtins
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from tuning_files import DONE

from bytesched import cli
from bytesched.bench.picture import draw_bench
from bytesched.errors import PluginError
from bytesched.report.iteration import IterationView, draw_iteration, view_iteration
from bytesched.trace.reading import read_traces
from bytesched.trace.timeline import Timeline
from bytesched.tunable import Setting
from bytesched.tuning.file import Trial
from bytesched.tuning.memory import Memory

MS = 1_000_000
LAYERS = 6


def write_run(folder: Path, *, crossing: bool, steps: int = 5) -> Path:
    """Forward 30 ms, backward 60 ms, six sends of 20 ms each from 40 ms after the start on.

    Plainly an iteration lasts until all is sent and updated, 165 ms; crossing, it lasts 120 ms
    and the last two sends lie in the next forward pass, of which the first layer waits 10 ms.
    """
    timeline = Timeline(folder)
    period_ms = 120 if crossing else 165
    for step in range(steps):
        start_ns = 10**9 + step * period_ms * MS

        def span(track: str, name: str, start_ms: int, end_ms: int, **args: int) -> None:
            begin_ns = start_ns + start_ms * MS  # noqa: B023 - called within this iteration
            timeline.on_span(track, name, begin_ns, begin_ns + (end_ms - start_ms) * MS, args)

        wait_ms = 10 if crossing and step else 0
        if wait_ms:
            span("wait", "layer0", 0, wait_ms)
        span("forward", "forward", 0, wait_ms + 30)
        for position, layer in enumerate(reversed(range(LAYERS))):
            begin_ms = wait_ms + 30 + position * 10
            span("backward", f"layer{layer}", begin_ms, begin_ms + 10)
            begin_ms = wait_ms + 40 + position * 20
            span("send", f"layer{layer}", begin_ms, begin_ms + 20, chunk=position)
        span("update", "optimizer", 155 + wait_ms, 160 + wait_ms)
        timeline.on_step(step, start_ns + period_ms * MS)
    timeline.close()
    return timeline.path


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    return (
        write_run(tmp_path / "plain", crossing=False),
        write_run(tmp_path / "crossing", crossing=True),
    )


def is_png(path: Path) -> bool:
    content = path.read_bytes()
    return content.startswith(b"\x89PNG\r\n\x1a\n") and content.endswith(b"IEND\xaeB`\x82")


def bench_result(workload: str = "gpt (emulated compute)") -> dict[str, Any]:
    def system(ms: float) -> dict[str, Any]:
        quartiles = {"first_quartile_ms": ms * 0.98, "third_quartile_ms": ms * 1.03}
        return {"figures": {"iteration_ms": ms, **quartiles}}

    return {
        "workload": workload,
        "world_size": 2,
        "network": "links of 1 Gbit/s between emulated hosts",
        "compute": {"optimum_ms": 200.0, "compute_ms": 180.0, "model_bytes": 20_000_000},
        "systems": {
            "ddp": system(340.0),
            "ddp-best": system(250.0) | {"bucket_mb": 4.0},
            "bytesched": system(210.0),
            "bytesched:policy=fifo+credit_bytes=1MiB": system(230.0),
        },
    }


def view_of(path: Path) -> IterationView:
    (trace,) = read_traces(path)
    return view_iteration(trace, "run")


def test_view_of_a_plain_run_shows_the_wait_at_the_barrier(runs: tuple[Path, Path]) -> None:
    view = view_of(runs[0])
    assert view.step_ms == pytest.approx(165)
    assert view.forward == [pytest.approx((0, 30)), pytest.approx((165, 195))]
    assert view.backward == [pytest.approx((30, 90))]
    assert view.wait == [pytest.approx((90, 155))], "the link is busy and nothing computes"
    assert view.iteration.crossed_ms == 0
    parts = [part for _, part in view.link]
    assert parts == [(layer / 6, (layer + 1) / 6) for layer in (5, 4, 3, 2, 1, 0)]


def test_view_of_a_crossing_run_shows_sends_behind_the_step(runs: tuple[Path, Path]) -> None:
    view = view_of(runs[1])
    assert view.step_ms == pytest.approx(120)
    assert view.wait == [pytest.approx((0, 10)), pytest.approx((120, 130))]
    assert view.forward == [pytest.approx((10, 40)), pytest.approx((130, 160))]
    assert view.iteration.crossed_ms == pytest.approx(40)
    behind = [part for (_, end), part in view.link if end > view.step_ms]
    assert behind == [(2 / 6, 3 / 6), (1 / 6, 2 / 6), (0, 1 / 6)]
    turns = [span for span, _ in view.link]
    for (_, end), (start, _) in itertools.pairwise(turns):
        assert start >= end, "one transfer at a time has the link"


def test_the_iteration_of_median_length_in_the_later_half_is_shown(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path)
    at_ns = 10**9
    for step, length_ms in enumerate((1, 10, 20, 30, 40, 50, 500, 90, 60, 70, 1)):
        timeline.on_span("forward", "f", at_ns, at_ns + MS // 2)
        at_ns += length_ms * MS
        timeline.on_step(step, at_ns)
    timeline.close()
    assert view_of(timeline.path).step_ms == pytest.approx(70)  # of 50, 500, 90, 60, 70


def test_a_trace_that_is_too_short_is_refused(tmp_path: Path, runs: tuple[Path, Path]) -> None:
    short = write_run(tmp_path / "short", crossing=False, steps=2)
    with pytest.raises(ValueError, match="the trace of bytesched must hold at least three steps"):
        draw_iteration(runs[0], short, tmp_path / "out.png")
    assert not (tmp_path / "out.png").exists()


@pytest.mark.parametrize("text", ["", "[]", "[3]", '{"traceEvents": 3}'])
def test_a_file_that_is_no_trace_is_named(
    text: str, tmp_path: Path, runs: tuple[Path, Path]
) -> None:
    path = tmp_path / "foreign.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"foreign.json: "):
        draw_iteration(path, runs[1], tmp_path / "out.png")


def test_draw_iteration_writes_the_same_png_whatever_the_users_settings(
    tmp_path: Path, runs: tuple[Path, Path]
) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    draw_iteration(*runs, tmp_path / "a.png")
    with matplotlib.rc_context({"axes.facecolor": "black", "font.size": 30}):
        draw_iteration(*runs, tmp_path / "b.png")
        assert matplotlib.rcParams["font.size"] == 30
    assert is_png(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert not list(tmp_path.glob(".*"))
    draw_iteration(runs[1], runs[0], tmp_path / "reversed.png")
    assert (tmp_path / "a.png").read_bytes() != (tmp_path / "reversed.png").read_bytes()


def test_words_of_the_picture(
    tmp_path: Path, runs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    figure_module = pytest.importorskip("matplotlib.figure")
    text_module = pytest.importorskip("matplotlib.text")
    words: list[str] = []
    savefig = figure_module.Figure.savefig

    def read_and_save(figure: Any, *args: Any, **options: Any) -> None:
        words.extend(text.get_text() for text in figure.findobj(text_module.Text))
        savefig(figure, *args, **options)

    monkeypatch.setattr(figure_module.Figure, "savefig", read_and_save)
    draw_iteration(*runs, tmp_path / "out.png")
    for expected in (
        "An iteration and the forward pass after it",
        "165 ms per iteration, 65 ms of it waiting",
        "120 ms per iteration, 10 ms of it waiting",
        "barrier: all sent, then step() returns",
        "45 ms saved per iteration (27%)",
    ):
        assert expected in words
    assert any(text.startswith("step() returns, ") and "still to send" in text for text in words)
    words.clear()
    draw_iteration(runs[1], runs[0], tmp_path / "out.png")
    assert "45 ms lost per iteration (38%)" in words


def test_a_failure_leaves_the_old_picture(
    tmp_path: Path, runs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    figure_module = pytest.importorskip("matplotlib.figure")
    out = tmp_path / "out.png"
    out.write_bytes(b"old")

    def fail(figure: Any, file: BinaryIO, **_: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(figure_module.Figure, "savefig", fail)
    with pytest.raises(OSError, match="No space"):
        draw_iteration(*runs, out)
    assert out.read_bytes() == b"old"
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("cases", [1, 2, 5])
def test_draw_bench_writes_a_panel_for_each_result(tmp_path: Path, cases: int) -> None:
    pytest.importorskip("matplotlib")
    results = []
    for case in range(cases):
        results.append(tmp_path / f"case{case}.json")
        results[-1].write_text(json.dumps(bench_result(f"case {case}")))
    draw_bench(results if cases > 1 else results[0], tmp_path / "bench.png")
    assert is_png(tmp_path / "bench.png")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"systems": {}, "compute": {"optimum_ms": 1}}'])
def test_draw_bench_names_a_file_that_is_no_result(tmp_path: Path, text: str) -> None:
    path = tmp_path / "odd.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"odd\.json"):
        draw_bench(path, tmp_path / "bench.png")


def test_without_matplotlib_the_message_names_the_extra(
    tmp_path: Path, runs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real_import = builtins.__import__

    def without(name: str, *args: Any, **options: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real_import(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(PluginError, match=r"pip install 'bytesched\[report\]'"):
        draw_iteration(*runs, tmp_path / "out.png")


def test_command(tmp_path: Path, runs: tuple[Path, Path], said: Callable[..., str]) -> None:
    pytest.importorskip("matplotlib")
    out, both = tmp_path / "out.png", tmp_path / "both.png"
    assert said("report", *runs, "-o", out) == f"{out}\n"
    draw_iteration(*runs, both)
    assert out.read_bytes() == both.read_bytes()
    said("report", *(run.parent for run in runs), "-o", out)
    assert out.read_bytes() == both.read_bytes(), "of folders as of files"
    result = tmp_path / "case.json"
    result.write_text(json.dumps(bench_result()))
    said("report", result, result, "-o", out)
    assert is_png(out)
    refused: list[list[Any]] = [
        [result],
        [runs[0], result, "-o", out],
        [runs[0], "-o", out],
        [tmp_path / "no.json", "-o", out],
    ]
    for wrong in refused:
        assert said("report", *wrong, code=1).startswith("bytesched report: ")
    for name, why in (("no/out.png", "no such folder"), ("out.svg", "expected .json or .png")):
        assert why in said("report", result, "-o", tmp_path / name, code=2)


@pytest.mark.parametrize("old", [*cli.REPLACED])
def test_an_older_name_is_told_the_new_one(
    old: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Callable[..., str]
) -> None:
    monkeypatch.chdir(tmp_path)
    told = said(old, "x.json", code=2)
    assert f"{old} is gone: {cli.REPLACED[old]}" in told


def test_a_folder_may_have_an_older_name(
    runs: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: Callable[..., str],
) -> None:
    runs[0].parent.rename(tmp_path / "timeline")
    monkeypatch.chdir(tmp_path)
    said("report timeline")


def test_the_settings_that_were_tried_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Callable[..., str]
) -> None:
    """Without what a search needs."""
    for name in ("numpy", "sklearn", "torch"):
        monkeypatch.setitem(sys.modules, name, None)
    path = tmp_path / "tuning.json"
    trials = [
        Trial(
            Setting(p << 18, w * p << 18), phase, 400.0 + p + w, (400.0, 402.0 + p, 900.0), p == 4
        )
        for p in (1, 2, 4)
        for w, phase in ((1, "search"), (2, "guard"))
    ]
    Memory(path).save(replace(DONE, trials=tuple(trials)))
    case, head, titles, *rows = said("report", path).splitlines()
    assert case == "gloo, 4 ranks on 2 hosts, cpu, a model of 40 MiB"
    assert head == f"{path}: partition 1 MiB, credit 3 MiB, 400.0 ms (9.1 % gained)"
    assert titles.split() == ["phase", "setting", "step", "ms", "steps"]
    assert len(rows) == len(trials)
    assert "partition 1 MiB, credit 1 MiB" in rows[-2]
    assert rows[-2].endswith("405.0      3  cut short")
    assert "leave out -o" in said("report", path, "-o", tmp_path / "out.png", code=1)
    other = tmp_path / "other.json"
    other.write_text('{"trials": []}')
    found = said("report", other, path, code=1)
    assert head in found
    assert f"{other.name}: not the memory of a tuning" in found


def test_help_says_how_to_get_the_two_traces(said: Callable[..., str]) -> None:
    shown = said("report --help")
    assert "BYTESCHED_TIMELINE=runs/before" in shown
    assert "torchrun --nproc-per-node 2 -m bytesched run train.py" in shown
