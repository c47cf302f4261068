"""docs/results.md, made from what was measured: a sentence and a table for each question."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from results_questions import Case, Column, Question

from bytesched.bench.table import chosen

__all__ = ["FEW", "PICTURE", "page", "results_of"]

#: with fewer timed iterations than this, a row shows that everything runs, and nothing else
FEW = 4
PICTURE = "results-{}.png"
NEAR = 0.05
HEAD = """\
# Results

<!-- Made by scripts/results from docs/results/*.json: change those, or the questions. -->

How long an iteration takes with bytesched, beside what its users have without it. A single time
means little, above all on a shared machine: read the ratios, which are medians over the rounds of
one run. *T\\** is a bound that no schedule of the same work can beat, *of gain* the share of what
lies between it and the best peer; [method](method.md) explains every column. The first cell of a
row links to all that was measured, with the command of that row. Two ranks must have the same bits
as plain training; among more, sums may round as they do between two bucket sizes of DDP. To measure
all of it again, run `scripts/results --measure` as root. What was tried on the way, and older
figures, are in dated [notes](notes/index.md).
"""

Results = dict[str, dict[str, Any]]


def results_of(questions: Sequence[Question], folder: Path) -> Results:
    """What was measured, by file; of what was not, or was stopped before its end, nothing."""
    paths = [folder / f"{case.file}.json" for each in questions for case in each.cases()]
    found = {
        path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()
    }
    return {file: result for file, result in found.items() if not result.get("stopped")}


def page(questions: Sequence[Question], results: Results, files: str, pictures: str) -> str:
    """The page as text. ``files`` and ``pictures`` lead to their folders from there."""
    parts = [HEAD, *_machine(results), ""]
    if any(_iterations(result) < FEW for result in results.values()):
        parts += [
            f"**Some rows come from fewer than {FEW} iterations (`--quick`): they show that "
            "everything runs, and nothing else.**",
            "",
        ]
    for question in questions:
        cases = [case for case in question.cases() if case.file in results]
        # Other pages link to each section.
        parts += [f"## {question.title}", ""]
        if cases:
            parts += _section(question, cases, results, files, pictures)
        else:
            parts += ["Not measured.", ""]
    return "\n".join(parts).rstrip() + "\n"


def _machine(results: Results) -> list[str]:
    """Where all of it was measured; a line for each machine, as there should be one."""
    found: dict[str, set[str]] = {}
    for machine in (result["machine"] for result in results.values()):
        if not machine["torch"]:
            continue
        memory = f"{machine['memory_bytes'] / 2**30:.0f} GiB"
        where = (
            f"{machine['cores']} cores of {machine['cpu']}, {memory}, kernel {machine['kernel']}"
        )
        found.setdefault(where, set()).add(machine["torch"])
    return [
        f"Measured on {where}, torch {' and '.join(sorted(its))}, no GPU."
        for where, its in found.items()
    ]


def _section(
    question: Question, cases: Sequence[Case], results: Results, files: str, pictures: str
) -> list[str]:
    its = [results[case.file] for case in cases]
    if question.columns:
        ratios = [_range(its, question.columns, peer) for peer in question.columns[:-1]]
        sentences = [question.sentence.format(*ratios), *_verdicts(question, cases, results)]
        table = _table(question, cases, results, files)
    else:
        sentences = [question.sentence]
        table = [line for result in its for line in _predictions(result)]
    commands = [series.command.replace("{clip}", "[--clip 1]") for series in question.series]
    missing = [case.label for case in question.cases() if case.file not in results]
    lines = [*_wrapped(" ".join(sentences)), "", *table, ""]
    if question.has_picture:
        name = PICTURE.format(question.name)
        lines += [f"![{question.title}]({pictures}{name})", ""]
    lines += ["```bash", *(line for command in commands for line in _broken(command)), "```", ""]
    lines += [_origin(its) + (f" Not measured: {'; '.join(missing)}." if missing else "")]
    return [*lines, ""]


def _table(question: Question, cases: Sequence[Case], results: Results, files: str) -> list[str]:
    titles = [", ".join(question.series[0].values[0]), "T\\* ms"]
    titles += [f"{column.title} ms" for column in question.columns] + ["x T\\*"]
    titles += [f"vs {column.title}" for column in question.columns[:-1]]
    titles += ["of gain"] * ("gain" in question.more)
    if "cpu" in question.more:
        titles.append("CPU ms of the last two")
    if "exchanges" in question.more:
        titles += ["p50, p95 ms of idle", "of each", "to idle"]
    if "memory" in question.more:
        titles += [f"{what} MB of each" for what in ("state", "peak")]
    lines = _head(titles)
    for case in cases:
        cells = [f"[{case.label}]({files}{case.file}.json)", *_cells(question, results[case.file])]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _head(titles: Sequence[str]) -> list[str]:
    return ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]


def _cells(question: Question, result: dict[str, Any]) -> list[str]:
    systems = [_system(result, column) for column in question.columns]
    times_ms = [system["figures"]["iteration_ms"] for system in systems if system]
    ours = systems[-1]
    bounds = [result["compute"].get(name) for name in ("optimum_ms", "pieces_optimum_ms")]
    cells = [" / ".join(f"{bound:.1f}" for bound in bounds if bound)]
    for system in systems:
        if not system:
            cells.append("-")
            continue
        ms = system["figures"]["iteration_ms"]
        time = f"**{ms:.1f}**" if ms == min(times_ms) else f"{ms:.1f}"
        cells.append(f"{time} ({chosen(system)})" if chosen(system) else time)
    cells.append(f"{ours['figures']['to_optimum']:.3f}" if ours else "-")
    for peer in question.columns[:-1]:
        ratio = _ratio(result, question.columns, peer)
        cells.append("-" if ratio is None else f"{ratio:.2f}x")
    if "gain" in question.more:
        share = ours.get("figures", {}).get("share_of_possible_gain")
        cells.append("-" if share is None else f"{100 * share:.0f} %")
    if "cpu" in question.more:
        cells.append(", ".join(_number(system, "cpu_ms") for system in systems[-2:]))
    if "exchanges" in question.more:
        cells += _exchange_cells(result, systems)
    if "memory" in question.more:
        for key in ("state_bytes", "peak_bytes"):
            cells.append(", ".join(_number(system, key, 1e6) for system in systems))
    return cells


def _exchange_cells(result: dict[str, Any], systems: Sequence[dict[str, Any]]) -> list[str]:
    """p50 and p95 of all-to-alls where no gradients are sent, and of each system."""

    def times(system: dict[str, Any]) -> str:
        return " / ".join(_number(system, f"exchange_{name}_ms") for name in ("p50", "p95"))

    idle = result["systems"].get("idle", {})
    ratio = systems[-2].get("figures", {}).get("exchange_p95_to_idle")
    to_idle = "-" if ratio is None else f"{ratio:.2f}x"
    return [times(idle), ", ".join(map(times, systems)), to_idle]


def _system(result: dict[str, Any], column: Column) -> dict[str, Any]:
    """What a file has for a column; nothing if that was not measured."""
    systems: dict[str, dict[str, Any]] = result["systems"]
    return next((systems[name] for name in column.systems if name in systems), {})


def _number(system: dict[str, Any], key: str, unit: float = 1.0) -> str:
    value = system.get("figures", {}).get(key)
    return "-" if value is None else f"{value / unit:.0f}"


def _ratio(result: dict[str, Any], columns: Sequence[Column], peer: Column) -> float | None:
    """How many times as long as ours an iteration of the peer takes: median over the rounds."""
    theirs, ours = (_rounds_ms(_system(result, column)) for column in (peer, columns[-1]))
    pairs = [a / b for a, b in zip(theirs, ours, strict=False)]
    return statistics.median(pairs) if pairs else None


def _rounds_ms(system: dict[str, Any]) -> list[float]:
    if "rounds_ms" in system:
        return list(system["rounds_ms"])
    return [statistics.median(turn["iteration_ms"]) for turn in system.get("rounds", ())]


def _iterations(result: dict[str, Any]) -> int:
    """Timed iterations of the system that has the fewest."""
    counts = [
        sum(len(turn["iteration_ms"]) for turn in system["rounds"])
        for system in result.get("systems", {}).values()
        if "rounds" in system
    ]
    return min(counts, default=FEW)


def _range(results: Sequence[dict[str, Any]], columns: Sequence[Column], peer: Column) -> str:
    found = [ratio for one in results if (ratio := _ratio(one, columns, peer)) is not None]
    if not found:
        return "(not measured)"
    least, most = f"{min(found):.2f}", f"{max(found):.2f}"
    return least if least == most else f"{least} to {most}"


def _verdicts(question: Question, cases: Sequence[Case], results: Results) -> list[str]:
    """Where ours is not the fastest, and whether it computes the same."""
    slower, different = [], []
    for case in cases:
        result = results[case.file]
        ratios = [_ratio(result, question.columns, peer) for peer in question.columns[:-1]]
        if any(ratio is not None and ratio < 1 for ratio in ratios):
            slower.append(case.label)
        losses = _system(result, question.columns[-1]).get("losses", "not compared")
        if losses != "identical":
            different.append(f"{case.label} ({losses})")
    fastest = question.columns[-1].title
    found = [f"**{fastest} is slower than one of them in: {'; '.join(slower)}.**" if slower else ""]
    same = "Losses and weights have the same bits in every row"
    return [
        *filter(None, found),
        f"{same} but: {'; '.join(different)}." if different else f"{same}.",
    ]


def _predictions(result: dict[str, Any]) -> list[str]:
    rows = result["rows"]
    systems = list(rows[0]["predicted_ms"])
    lines = _head(["hosts, model", "T\\* ms", *systems])
    errors = []
    for row in rows:
        cells = [f"{row['hosts']}, {row['model']}", f"{row['optimum_ms']:.1f}"]
        for system in systems:
            predicted, measured = row["predicted_ms"][system], row["measured_ms"][system]
            errors.append(predicted / measured - 1)
            cells.append(f"{predicted:.1f} / {measured:.1f} ({100 * errors[-1]:+.1f} %)")
        lines.append("| " + " | ".join(cells) + " |")
    near = sum(abs(error) <= NEAR for error in errors)
    worst = max(errors, key=abs)
    return [
        *lines,
        "",
        f"{near} of {len(errors)} are within {100 * NEAR:.0f} %; the worst is off by "
        f"{100 * worst:+.1f} %.",
    ]


def _origin(results: Sequence[dict[str, Any]]) -> str:
    """When, of which commit and with how much stolen time."""
    days = sorted({result["date"][:10] for result in results})
    commits = sorted(
        {
            (result["commit"][:9] or result["version"]) + " with changes" * result["dirty"]
            for result in results
        }
    )
    stolen = [100 * result["stolen_share"] for result in results if "stolen_share" in result]
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    text = f"{when}, commit {', '.join(commits)}"
    return f"{text}, at most {max(stolen):.0f} % of the busy time stolen." if stolen else f"{text}."


def _wrapped(text: str, between: str = " ") -> list[str]:
    """Lines of at most 110 characters, broken at blanks that fit ``between``."""
    lines = [""]
    for word in re.split(between, text):
        if lines[-1] and len(lines[-1]) + len(word) > 110:
            lines.append("")
        lines[-1] += f"{' ' * bool(lines[-1])}{word}"
    return lines


def _broken(command: str) -> list[str]:
    """A command over lines, each but the last ending in a backslash, broken before options."""
    lines = _wrapped(command, " (?=--)")
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]
