"""Runs of the bench that take no time."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from warm_python import warm_python

#: below the limit of a test
TIMEOUT_S = 250.0
QUICK = ("--iterations", "2", "--rounds", "2", "--warmup", "3", "--sweep-iterations", "1")
ONCE = (*QUICK, "--rounds", "1")


@dataclass(frozen=True)
class Bench:
    """Its runs in a folder."""

    folder: Path
    #: what its interpreter has imported
    modules: Sequence[str] = ()

    def run(self, *arguments: str, program: Sequence[str] = ("bytesched", "bench")) -> Any:
        command = [warm_python(*self.modules), "-m", *program, *arguments]
        try:
            return subprocess.run(
                command,
                cwd=self.folder,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            said = [(part or b"").decode(errors="replace") for part in (error.stdout, error.stderr)]
            pytest.fail("\n".join([str(error), *said]))

    def result(self, *arguments: str, program: Sequence[str] = ("bytesched", "bench")) -> Any:
        """What it has measured, and what it has said."""
        done = self.run(*arguments, "--json", "out.json", program=program)
        assert done.returncode == 0, done.stderr
        return self.read("out.json") | {"stdout": done.stdout}

    def write(self, name: str, content: object) -> None:
        (self.folder / name).write_text(json.dumps(content))

    def read(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text())


def losses(result: dict[str, Any]) -> dict[str, str]:
    return {name: system["losses"] for name, system in result["systems"].items()}
