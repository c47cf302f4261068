"""Tests that wait for a build, in a session of their own whose build is a script of the test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT, SUPPORT

TESTS = """
from pathlib import Path

import builds
import pytest

HERE = Path(__file__).parent


@pytest.mark.needs("mxnet")
@pytest.mark.parametrize("number", [1, 2])
def test_with_mxnet(number):
    assert (HERE / "ran").exists()
    assert builds.python_with("mxnet") == "python with mxnet"


def test_without():
    assert not (HERE / "built").exists()
    (HERE / "ran").touch()
"""
#: it ends when the test has run that does not wait for it
BUILDS = 'echo building\nuntil [ -e ran ]; do sleep 0.01; done\necho "$1" >>built'
FINDS = "if [ -e built ]; then echo python with mxnet; else echo no mxnet here >&2; exit 1; fi"


def run(folder: Path, *arguments: str, setup: str = BUILDS) -> str:
    """What a session of pytest says whose `scripts/setup` is this."""
    (folder / "test_both.py").write_text(TESTS)
    (folder / "paths.py").write_text(f"from pathlib import Path\nROOT = Path({str(folder)!r})\n")
    (folder / "scripts").mkdir()
    for name, body in {"setup": setup, "mxnet-venv": FINDS}.items():
        script = folder / "scripts" / name
        script.write_text(f"#!/bin/sh\ncd {folder}\n{body}\n")
        script.chmod(0o755)
    command = [sys.executable, "-m", "pytest", "-p", "builds", "-W", "error", "-o", "markers=needs"]
    ended = subprocess.run(
        [
            *command,
            "-ra",
            "--timeout",
            "100",
            "-c",
            os.devnull,
            "--rootdir",
            folder,
            *arguments,
            folder,
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(SUPPORT), str(ROOT)])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=250,
        check=False,
    )
    return ended.stdout


@pytest.mark.parametrize("processes", [1, 2])
def test_a_test_waits_for_what_it_needs_and_others_come_first(
    tmp_path: Path, processes: int
) -> None:
    shared = ("-n", str(processes), "--dist", "loadgroup") if processes > 1 else ()
    said = run(tmp_path, "--build", *shared)
    assert "3 passed" in said, said
    # Each process has asked; the script sees to it that one alone builds.
    assert (tmp_path / "built").read_text().split() == ["mxnet"] * processes


def test_what_no_selected_test_needs_is_not_built(tmp_path: Path) -> None:
    said = run(tmp_path, "--build", "-k", "without")
    assert "1 passed, 2 deselected" in said, said
    assert not (tmp_path / "built").exists()


def test_nothing_is_built_unless_asked_for(tmp_path: Path) -> None:
    said = run(tmp_path)
    assert "1 passed, 2 skipped" in said, said
    assert "no mxnet here" in said


def test_a_build_that_fails_is_an_error_of_the_tests_that_need_it(tmp_path: Path) -> None:
    said = run(tmp_path, "--build", setup="echo no room left\nexit 1")
    assert "1 passed, 2 errors" in said, said
    assert "./scripts/setup mxnet has failed" in said
    assert "no room left" in said
