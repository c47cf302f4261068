"""docs/results.md: its times are those of its files, whose commands the bench still knows."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

from paths import ROOT

from bytesched.bench.specification import bench_parser
from bytesched.bench.systems import parse_systems

FILES = {path.stem: path for path in sorted((ROOT / "docs" / "results").glob("*.json"))}
PAGE = (ROOT / "docs" / "results.md").read_text()
#: the file that a row links to, its T*, and all that follows
ROW = re.compile(r"^\| \[[^\]]+\]\(results/([\w-]+)\.json\) \| ([^|]+) \| (.+) \|$", re.MULTILINE)
ROWS: dict[str, tuple[str, str]] = {file: (bound, rest) for file, bound, rest in ROW.findall(PAGE)}
#: a script had this command: MXNet needs an environment of its own
NOT_OF_THE_BENCH = {"stores-mxnet-1-gpt"}
#: has a table of its own
PREDICTIONS = "predictions"


def found(file: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(FILES[file].read_text())
    return content


def test_every_file_has_a_row() -> None:
    assert ROWS.keys() | {PREDICTIONS} == FILES.keys()


def test_the_times_of_a_row_are_those_of_its_file() -> None:
    for file, (bound, rest) in ROWS.items():
        compute = found(file)["compute"]
        bounds = [compute.get(name) for name in ("optimum_ms", "pieces_optimum_ms")]
        assert bound == " / ".join(f"{ms:.1f}" for ms in bounds if ms), file
        times = set(re.findall(r"(?<=\| )\d+\.\d(?= )", f"| {rest} |".replace("**", "")))
        systems = found(file)["systems"]
        # What sends no gradients stands beside them, with its exchanges alone.
        shown = {its["figures"]["iteration_ms"] for name, its in systems.items() if name != "idle"}
        assert times == {f"{ms:.1f}" for ms in shown}, file


def test_predictions_are_those_of_their_file() -> None:
    for row in found(PREDICTIONS)["rows"]:
        measured, predicted = row["measured_ms"], row["predicted_ms"]
        cells = [
            f"{ms:.1f} / {measured[name]:.1f} ({100 * (ms / measured[name] - 1):+.1f} %)"
            for name, ms in predicted.items()
        ]
        line = [f"{row['hosts']}, {row['model']}", f"{row['optimum_ms']:.1f}", *cells]
        assert f"| {' | '.join(line)} |" in PAGE


def test_commands_are_understood() -> None:
    for file in ROWS.keys() - NOT_OF_THE_BENCH:
        words = shlex.split(found(file)["command"])
        options = bench_parser().parse_args(words[words.index("bench") + 1 :])
        assert parse_systems(options.systems), file
