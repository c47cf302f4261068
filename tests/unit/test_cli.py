"""The command: help, unknown commands, exit codes."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest

import bytesched
from bytesched import cli
from bytesched.errors import PluginError


def _command(monkeypatch: pytest.MonkeyPatch, main: Callable[[Sequence[str]], int]) -> None:
    monkeypatch.setitem(cli.COMMANDS, "probe", cli.Command("probe_module", "a line"))
    monkeypatch.setattr(importlib, "import_module", lambda _: SimpleNamespace(main=main))


@pytest.mark.parametrize("arguments", ["", "--help", "-h"])
def test_help_names_every_command(arguments: str, said: Callable[..., str]) -> None:
    shown = said(arguments)
    for name, command in cli.COMMANDS.items():
        assert f"{name} " in shown
        assert command.line in shown
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_command_has_a_main_with_help(name: str, said: Callable[..., str]) -> None:
    assert callable(importlib.import_module(cli.COMMANDS[name].module).main)
    assert f"usage: bytesched {name}" in said(name, "--help")


def test_arguments_and_exit_code_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Sequence[str]] = []

    def command(argv: Sequence[str]) -> int:
        seen.append(argv)
        return 7

    _command(monkeypatch, command)
    assert cli.main(["probe", "--help", "x"]) == 7
    assert seen == [["--help", "x"]]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (PluginError("no such model"), 1, "bytesched probe: no such model\n"),
        (KeyboardInterrupt(), 130, ""),
        (ZeroDivisionError(), None, ""),
    ],
)
def test_a_named_error_is_one_line_and_another_one_keeps_its_traceback(
    error: BaseException,
    code: int | None,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def command(_: Sequence[str]) -> int:
        raise error

    _command(monkeypatch, command)
    if code is None:
        with pytest.raises(type(error)):
            cli.main(["probe"])
    else:
        assert cli.main(["probe"]) == code
    assert capsys.readouterr().err == said


def test_reader_that_has_enough_is_code_141() -> None:
    code = (
        "import sys; from types import SimpleNamespace; from bytesched import cli\n"
        "def main(argv):\n    while True: print('line' * 1000)\n"
        "cli.COMMANDS['probe'] = cli.Command('probe', 'a line')\n"
        "sys.modules['probe'] = SimpleNamespace(main=main)\n"
        "sys.exit(cli.main(['probe']))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        run.stdout.readline()
        run.stdout.close()
        assert run.stderr.read() == ""
        assert run.wait(timeout=250) == 141


def test_module_runs_as_the_command(python: Callable[..., str], said: Callable[..., str]) -> None:
    version = f"bytesched {bytesched.__version__}\n"
    assert python("-m", "bytesched", "--version") == said("--version") == version
