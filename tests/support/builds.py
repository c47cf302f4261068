"""What takes minutes to build, and only some tests need: built beside the others, which come first.

Such a test is marked `needs("horovod")`, with the name of a step of `scripts/setup`. With `--build`
the steps that the selected tests need are taken in the background, and those tests wait for them.
Tests whose step is missing then, or without `--build`, are skipped.
"""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Generator
from functools import cache
from typing import IO

import pytest
from paths import ROOT

#: in the order in which tests wait for them: downloads first, then what a compiler has to build
STEPS = ("trainers", "mxnet", "horovod")
#: how long a test waits: many times what a build takes on one busy core
LIMIT_S = 3600.0


def needs(item: pytest.Item) -> list[str]:
    """Steps that a test waits for."""
    named = {step for marker in item.iter_markers("needs") for step in marker.args}
    assert named <= set(STEPS), f"{item.nodeid} needs {named}: there are {STEPS}"
    return [step for step in STEPS if step in named]


def python_with(step: str) -> str:
    """The Python that has MXNet, or the trainers; to be asked in a test that needs it."""
    python, why_not = _found(step)
    assert python, why_not
    return python


def why_missing(step: str) -> str:
    """What a test that needs the step is skipped for; empty if nothing is missing."""
    if step != "horovod":
        return _found(step)[1]
    there = importlib.util.find_spec("horovod") is not None
    return "" if there else "Horovod is not installed: ./scripts/setup builds it"


@cache
def _found(step: str) -> tuple[str, str]:
    """The Python in an environment of its own, or nothing and the reason."""
    found = subprocess.run(
        [ROOT / "scripts" / f"{step}-venv", "--find", sys.executable],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    return found.stdout.strip(), found.stderr.strip()


class Build:
    """A step that runs in the background; where several processes start it, one takes it."""

    def __init__(self, step: str) -> None:
        self._step = step
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - until it has ended
        self._process = subprocess.Popen(
            [ROOT / "scripts" / "setup", step],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def failure(self) -> str:
        """What became of it, once it has ended or `LIMIT_S` are over; empty if it went well."""
        try:
            code = self._process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"./scripts/setup {self._step} has not ended in {LIMIT_S:g} s:\n{self._said()}"
        # This process may have looked in vain before.
        importlib.invalidate_caches()
        said = self._said()
        self._log.close()
        return f"./scripts/setup {self._step} has failed:\n{said}" if code else ""

    def _said(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-3000:]


class Builds:
    """Has tests wait for the steps that they need, before the time of the test begins."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._running: dict[str, Build] = {}
        self._failures: dict[str, str] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for step in sorted({step for item in session.items for step in needs(item)}):
            self._running[step] = Build(step)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        for step in needs(item):
            if build := self._running.pop(step, None):
                if build.runs:
                    self._say(f"waiting for ./scripts/setup {step}")
                self._failures[step] = build.failure()
        return (yield)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        for step in needs(item):
            if failure := self._failures.get(step):
                pytest.fail(failure, pytrace=False)

    def _say(self, line: str) -> None:
        capture = self._config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled():
            print(f"\n{line}", file=sys.stderr, flush=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--build",
        action="store_true",
        help="build what the selected tests need, beside those that need no build",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.build and not config.option.collectonly:
        config.pluginmanager.register(Builds(config))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # pytest-xdist hands tests out in this order, and every process has to see the same.
    items.sort(key=lambda item: max((STEPS.index(step) + 1 for step in needs(item)), default=0))


def pytest_runtest_setup(item: pytest.Item) -> None:
    for step in needs(item):
        if why := why_missing(step):
            pytest.skip(why)
