"""What stands for the daemon of MPS, and writes down how it is called."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_SCRIPT = """\
#!/bin/sh
if [ "$1" = serve ]; then while :; do sleep 0.1; done; fi
if [ "$1" = -d ]; then
    echo "start $CUDA_MPS_PIPE_DIRECTORY ${CUDA_VISIBLE_DEVICES-none}" >> CALLS
    START
else
    read -r line; echo "$line" >> CALLS
fi
"""
#: goes on after `quit`
STUBBORN = '"$0" serve & echo $! > "$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid"'
FAILS = "echo not permitted; exit 1"


class FakeMps:
    """The program ``nvidia-cuda-mps-control`` on PATH."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, start: str = "") -> None:
        self._calls = folder / "calls"
        self._calls.touch()
        self.path = folder / "nvidia-cuda-mps-control"
        self.path.write_text(
            _SCRIPT.replace("CALLS", str(self._calls)).replace("START", start or ":")
        )
        self.path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    @property
    def verbs(self) -> list[str]:
        """``start`` and ``quit``, as they were called."""
        return [line.split()[0] for line in self._calls.read_text().splitlines()]

    @property
    def started(self) -> list[str]:
        """The folder of pipes and the visible devices of the first start."""
        return self._calls.read_text().splitlines()[0].split()[1:]
