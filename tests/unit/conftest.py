"""Sessions whose wire is in this process, and programs in a process of their own.

Torch is imported where a session is asked for.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from bytesched import cli
from bytesched.kvstore import Ended, Key

if TYPE_CHECKING:
    from fake_wire import Run

# Examples take as long as the machine lets them.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


@pytest.fixture
def python() -> Callable[..., str]:
    """Runs an interpreter with these arguments, which has to end well; what it has printed."""

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, timeout=250, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command, which has to end with that code; what it has printed and complained of."""

    def run(*arguments: str | Path, code: int = 0) -> str:
        words: list[str] = []
        for argument in arguments:
            words += argument.split() if isinstance(argument, str) else [str(argument)]
        try:
            ended: Any = cli.main(words)
        except SystemExit as leave:
            ended = leave.code
        assert ended == code
        return "".join(capsys.readouterr())

    return run


class HeldStore:
    """One worker's store that ends nothing by itself."""

    rank, num_workers = 0, 1

    def __init__(self) -> None:
        self.keys: list[Key] = []
        self.pushes: list[tuple[Key, Ended]] = []
        self.pulls: list[tuple[Key, Ended]] = []

    def init(self, key: Key, value: Any) -> None:
        self.keys.append(key)

    def delete(self, key: Key) -> None:
        self.keys.remove(key)

    def start_push(self, key: Key, value: Any, ended: Ended, priority: int = 0) -> None:
        self.pushes.append((key, ended))

    def start_pull(self, key: Key, out: Any, ended: Ended, priority: int = 0) -> None:
        self.pulls.append((key, ended))

    def close(self) -> None:
        pass


@pytest.fixture
def held_store() -> HeldStore:
    return HeldStore()


@pytest.fixture
def pair() -> Iterator[Callable[..., tuple[Run, Run]]]:
    """A plain module's run, with nothing under way, and the same without a session."""
    from fake_wire import FakeWire, Run

    runs: list[Run] = []

    def make(steps: int = 2, **options: Any) -> tuple[Run, Run]:
        ours, plain = (Run(wire, is_plain=True, **options) for wire in (FakeWire(), None))
        runs.append(ours)
        for run in (ours, plain):
            run.train(steps)
        ours.session.flush()
        return ours, plain

    yield make
    for run in runs:
        run.close()
