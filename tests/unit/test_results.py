"""docs/results.md: what its files give, short; its commands are those of the bench."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import results_main
from results_page import page
from results_questions import QUESTIONS, Case, Column, Question, Series

from bytesched.bench.arguments import bench_parser
from bytesched.bench.systems import parse_systems

ORIGIN = {
    "date": "2026-11-25T08:00:00+00:00",
    "commit": "0123456789abcdef",
    "version": "0.2.0",
    "dirty": False,
    "machine": {
        "cpu": "Some CPU",
        "cores": 2,
        "memory_bytes": 24 << 30,
        "kernel": "6.1",
        "torch": "2.13.0",
    },
}
QUESTION = Question(
    "ddp",
    "DDP",
    "How much? DDP takes {0} times as long, at its best {1} times.",
    (Series("chrt -r 5 bytesched bench --lab {hosts} --emulate {model}", (
        {"hosts": "2", "model": "gpt"}, {"hosts": "4", "model": "gpt"})),),
    (Column("ddp", ("ddp",)), Column("best", ("ddp-best",)), Column("bytesched", ("bytesched",))),
    minutes=1,
    more=("gain", "cpu", "memory"),
)  # fmt: skip


def measured(ours_ms: tuple[float, ...], losses: str = "identical", **more: Any) -> dict[str, Any]:
    """A file in which DDP takes 200 ms, and 150 with its best bucket."""

    def system(rounds_ms: tuple[float, ...]) -> dict[str, Any]:
        return {
            "rounds": [{"iteration_ms": [ms] * 4} for ms in rounds_ms],
            "figures": {"iteration_ms": rounds_ms[0], "to_optimum": 1.25, "cpu_ms": 30.4},
            "losses": losses,
        }

    systems = {name: system((ms,) * len(ours_ms)) for name, ms in (("ddp", 200.0),)}
    systems["ddp-best"] = system((150.0,) * len(ours_ms)) | {"bucket_mb": 1.0}
    systems["bytesched"] = system(ours_ms)
    systems["bytesched"]["figures"] |= {"share_of_possible_gain": 0.5, "state_bytes": 85.3e6}
    return {
        **ORIGIN,
        "stolen_share": 0.02,
        "compute": {"optimum_ms": 80.0},
        "systems": systems,
        **more,
    }


def test_a_question_has_a_sentence_with_ratios_and_a_row_for_each_file() -> None:
    results = {"ddp-2-gpt": measured((100.0, 125.0, 100.0)), "ddp-4-gpt": measured((160.0,) * 2)}
    text = page([QUESTION], results, "results/", "images/")
    # As if no line were broken.
    text = " ".join(text.split())
    assert "Measured on 2 cores of Some CPU, 24 GiB, kernel 6.1, torch 2.13.0, no GPU." in text
    assert "DDP takes 1.25 to 2.00 times as long, at its best 0.94 to 1.50 times." in text
    assert "**bytesched is slower than one of them in: 4, gpt.**" in text
    assert "Losses and weights have the same bits in every row." in text
    assert (
        "| [2, gpt](results/ddp-2-gpt.json) | 80.0 | 200.0 | 150.0 (1 MB) | **100.0** | 1.250 "
        "| 2.00x | 1.50x | 50 % | 30, 30 | -, -, 85 | -, -, - |"
    ) in text
    assert "2026-11-25, commit 012345678, at most 2 % of the busy time stolen." in text
    assert "quick" not in text


def test_what_is_missing_different_or_too_little_is_said() -> None:
    other = measured((100.0,), losses="differ by 1.0e-07", dirty=True)
    other["systems"]["ddp"]["rounds"] = [{"iteration_ms": [200.0]}]
    text = " ".join(page([QUESTION], {"ddp-2-gpt": other}, "", "").split())
    assert "come from fewer than 4 iterations" in text
    assert "same bits in every row but: 2, gpt (differ by 1.0e-07)." in text
    assert "commit 012345678 with changes" in text
    assert "Not measured: 4, gpt." in text
    assert page([QUESTION], {}, "", "").endswith("## DDP\n\nNot measured.\n")


def test_predictions_stand_beside_what_was_measured() -> None:
    [question] = (each for each in QUESTIONS if each.name == "predictions")
    row = {
        "hosts": 2,
        "model": "gpt",
        "optimum_ms": 80.0,
        "measured_ms": {"ddp": 200.0, "bytesched": 100.0},
        "predicted_ms": {"ddp": 202.0, "bytesched": 94.0},
    }
    text = page([question], {"predictions": {**ORIGIN, "rows": [row]}}, "", "")
    assert "| 2, gpt | 80.0 | 202.0 / 200.0 (+1.0 %) | 94.0 / 100.0 (-6.0 %) |" in text
    assert "1 of 2 are within 5 %; the worst is off by -6.0 %." in text


def test_the_page_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert results_main.check([QUESTION], tmp_path) == 1
    (tmp_path / "ddp-2-gpt.json").write_text(json.dumps(measured((100.0,))))
    results_main.write([QUESTION], tmp_path)
    assert results_main.check([QUESTION], tmp_path) == 0
    for other in (measured((101.0,)), measured((100.0,), stopped=True)):
        (tmp_path / "ddp-2-gpt.json").write_text(json.dumps(other))
        assert results_main.check([QUESTION], tmp_path) == 1
    results_main.write([QUESTION], tmp_path)
    monkeypatch.setattr(results_main, "MOST_LINES", 10)
    assert results_main.check([QUESTION], tmp_path) == 1
    assert "more than 10" in capsys.readouterr().out


def test_the_page_in_the_repository_is_what_its_files_give() -> None:
    assert results_main.check(QUESTIONS, results_main.RESULTS) == 0


def test_every_file_answers_a_question() -> None:
    known = {case.file for question in QUESTIONS for case in question.cases()}
    assert {path.stem for path in results_main.RESULTS.glob("*.json")} <= known


CASES = [case for question in QUESTIONS for case in question.cases()]


def test_every_case_has_a_file_of_its_own() -> None:
    assert len({case.file for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.file)
@pytest.mark.parametrize("is_quick", [False, True])
def test_every_command_is_understood(
    case: Case, is_quick: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results_main, "_python", lambda _: "python-of-a-script")
    (tmp_path / "ddp-2-gpt.json").touch()
    words = results_main.arguments_of(case, tmp_path, is_quick=is_quick)
    assert words[-2:] == ["--json", str(tmp_path / f"{case.file}.json")]
    if "bench" in words:
        assert words.count("-m") == 1
        options = bench_parser().parse_args(words[words.index("bench") + 1 :])
        assert (options.iterations * options.rounds >= 4) is not is_quick
        systems = {system.label for system in parse_systems(options.systems)}
        [question] = (each for each in QUESTIONS if case in each.cases())
        assert all(systems & set(column.systems) for column in question.columns)
    elif "ddp-*.json" in case.command:
        assert str(tmp_path / "ddp-2-gpt.json") in words
    else:
        assert "measure-mxnet" in shlex.join(words)


FAKE = """\
import json, sys
path = sys.argv[sys.argv.index("--json") + 1]
open(path, "w").write(json.dumps({"network": sys.argv[1]}))
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize(
    ("network", "code", "fails"),
    [("links of 1", 0, False), ("loopback", 0, True), ("links of 1", 3, True)],
)
def test_a_file_stays_only_if_its_command_ended_well_on_shaped_links(
    network: str,
    code: int,
    fails: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "fake.py").write_text(FAKE)

    def arguments_of(case: Case, folder: Path, *, is_quick: bool) -> list[str]:
        command = ["python3", str(tmp_path / "fake.py"), network, str(code), "--lab", "2"]
        return [*command, "--json", str(folder / f"{case.file}.json")]

    monkeypatch.setattr(results_main, "arguments_of", arguments_of)
    folder = tmp_path / "new" / "folder"
    folder.mkdir(parents=True)
    (folder / "ddp-2-gpt.json").write_text("old")
    failed = results_main.measure([QUESTION], folder, is_quick=True)
    names = ["ddp-2-gpt", "ddp-4-gpt"]
    assert failed == (names if fails else [])
    assert sorted(path.stem for path in folder.glob("*.json")) == ([] if fails else names)
