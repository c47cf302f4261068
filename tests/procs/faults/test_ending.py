"""How a process ends that has something to say at its end: alone, or as a child of another."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

ENDS = """
import atexit
import multiprocessing
import sys

from bytesched.plugins import ending


class Owner:
    def end(self):
        print(self.__class__.__name__, flush=True)
        ending.make_exit_fail()


class Other(Owner):
    pass


def train():
    atexit.register(print, "the script's own", flush=True)
    owners = [Owner(), Other(), Owner()]
    for owner in owners:
        ending.at_exit(owner.end)
    ending.not_at_exit(owners[2].end)


if __name__ == "__main__":
    if sys.argv[1] == "alone":
        train()
    else:
        child = multiprocessing.get_context(sys.argv[1]).Process(target=train)
        child.start()
        child.join()
        print(child.exitcode)
"""


def ended(tmp_path: Path, how: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    return subprocess.run(
        [sys.executable, str(script), how],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60.0,
        check=False,
    )


def test_a_process_ends_with_1_after_all_else_was_done(tmp_path: Path) -> None:
    run = ended(tmp_path, "alone")
    assert run.stdout.splitlines() == ["Other", "Owner", "the script's own"], run.stderr
    assert run.returncode == 1


@pytest.mark.parametrize("how", ["fork", "forkserver", "spawn"])
def test_so_does_a_child_of_multiprocessing(tmp_path: Path, how: str) -> None:
    run = ended(tmp_path, how)
    assert run.stdout.split("\n")[:2] == ["Other", "Owner"], run.stderr
    assert run.stdout.rstrip().endswith("\n1"), run.stdout + run.stderr
