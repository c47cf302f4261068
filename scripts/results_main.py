"""Measures what docs/results.md shows, and makes it: see scripts/results."""

from __future__ import annotations

import argparse
import glob
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from results_page import PICTURE, page, results_of
from results_questions import QUESTIONS, Case, Question

from bytesched.bench.picture import draw_bench
from bytesched.environment import child_environment
from bytesched.files import write_text

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
PAGE = ROOT / "docs" / "results.md"
PICTURES = ROOT / "docs" / "images"
#: the page is read by people
MOST_LINES = 300
QUICK = {
    "bytesched": "--iterations 2 --rounds 1 --warmup 2 --sweep-iterations 1",
    "scripts/measure-mxnet": "--iterations 2 --rounds 1 --warmup 2",
}
#: in a command: what makes another Python and prints its path
PYTHON = re.compile(r"\$\((scripts/[^)]+)\)")
#: of `scripts/calibrate-sim`, where a prediction misses
MISSES = 1


def made(questions: Sequence[Question], folder: Path) -> tuple[Path, Path, str]:
    """Where the page and its pictures are, and what it says, from the files in ``folder``."""
    results = results_of(questions, folder)
    if folder.resolve() == RESULTS:
        return PAGE, PICTURES, page(questions, results, "results/", "images/")
    return folder / "results.md", folder, page(questions, results, "", "")


def write(questions: Sequence[Question], folder: Path) -> None:
    """Write the page and its pictures."""
    path, pictures, text = made(questions, folder)
    for question in questions:
        files = [folder / f"{case.file}.json" for case in question.cases()]
        if question.has_picture and (there := [file for file in files if file.exists()]):
            draw_bench(there, pictures / PICTURE.format(question.name))
    write_text(path, text)
    print(f"{path}: {len(text.splitlines())} lines")


def check(questions: Sequence[Question], folder: Path) -> int:
    """0 if the page is what the files give, and short enough."""
    path, _, text = made(questions, folder)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        print(f"{path} is not what the files in {folder} give: run scripts/results")
        return 1
    if (lines := len(text.splitlines())) > MOST_LINES:
        print(f"{path} has {lines} lines, more than {MOST_LINES}")
        return 1
    return 0


def arguments_of(case: Case, folder: Path, *, is_quick: bool) -> list[str]:
    """The command of a case, as it can be run here."""
    words = shlex.split(PYTHON.sub(_python, case.command))
    name = next(word for word in words if word in QUICK or word.startswith("scripts/"))
    if is_quick:
        words += shlex.split(QUICK.get(name, ""))
    # As a result names it: no path of the machine stands in it.
    folder = folder.resolve()
    folder = folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder
    words += ["--json", str(folder / f"{case.file}.json")]
    at = words.index(name)
    if name == "bytesched" and words[at - 1] != "-m":
        words[at : at + 1] = [sys.executable, "-m", "bytesched"]
    elif at == 0:
        words[:1] = [sys.executable, str(ROOT / name)]
    return [
        found
        for word in words
        for found in (sorted(glob.glob(str(folder / word))) if "*" in word else [word])
    ]


def _python(named: re.Match[str]) -> str:
    """Its path; where it cannot be made, what fails in its place."""
    made = subprocess.run(shlex.split(named[1]), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    return made.stdout.strip() or "false"


def measure(questions: Sequence[Question], folder: Path, *, is_quick: bool) -> list[str]:
    """Run the commands of these questions; the names of those that failed."""
    folder.mkdir(parents=True, exist_ok=True)
    cases = [(question, case) for question in questions for case in question.cases()]
    environment = child_environment({"PYTHONPATH": str(ROOT)})
    failed = []
    for number, (_, case) in enumerate(cases, start=1):
        result = folder / f"{case.file}.json"
        # So that no old figure stands beside new ones.
        result.unlink(missing_ok=True)
        command = arguments_of(case, folder, is_quick=is_quick)
        print(f"\n[{number}/{len(cases)}] {case.file}: {case.command}", flush=True)
        began_s = time.monotonic()
        process = subprocess.Popen(command, cwd=ROOT, env=environment)
        try:
            code = process.wait()
        except KeyboardInterrupt:
            # It takes its hosts down, and writes what it has, which is not all.
            process.wait()
            result.unlink(missing_ok=True)
            raise
        print(f"{case.file}: {time.monotonic() - began_s:.0f} s", flush=True)
        is_shaped = "--lab" not in command or "links of" in _text(result)
        if code not in (0, MISSES) or not result.exists() or not is_shaped:
            result.unlink(missing_ok=True)
            failed.append(case.file)
            print(f"{case.file}: failed with exit code {code}", file=sys.stderr)
    return failed


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def listed(questions: Sequence[Question]) -> None:
    """Print the questions, with their minutes and commands."""
    for question in questions:
        print(f"{question.name}: {question.title}, {question.minutes:g} min")
        for case in question.cases():
            print(f"    {case.file}: {case.command}")
    print(f"all: {sum(question.minutes for question in questions):g} min on two quiet cores")


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    names = [question.name for question in QUESTIONS]
    parser = argparse.ArgumentParser(prog="scripts/results", description=__doc__)
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--check", action="store_true", help="fail if the page is not up to date")
    group.add_argument("--list", action="store_true", help="show the questions and their commands")
    group.add_argument("--measure", nargs="*", metavar="QUESTION", help=", ".join(names))
    parser.add_argument("--quick", action="store_true", help="measure too little, to try it")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="of the JSON files")
    options = parser.parse_args(argv)
    if options.quick and options.measure is None:
        parser.error("--quick is for --measure")
    if options.check:
        return check(QUESTIONS, options.folder)
    if options.list:
        listed(QUESTIONS)
        return 0
    failed = []
    if options.measure is not None:
        if unknown := set(options.measure) - set(names):
            parser.error(f"{min(unknown)}: no question; there are {', '.join(names)}")
        if os.geteuid():
            parser.error("--measure needs root, for priorities and links of a rate")
        asked = [each for each in QUESTIONS if each.name in (options.measure or names)]
        failed = measure(asked, options.folder, is_quick=options.quick)
    write(QUESTIONS, options.folder)
    if failed:
        print(f"not measured: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
