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


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_help_names_every_command(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = cli.main(argv)
    except SystemExit as leave:
        code = int(str(leave.code))
    assert code == 0
    shown = capsys.readouterr().out
    for name, command in cli.COMMANDS.items():
        assert f"{name} " in shown
        assert command.line in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leave:
        cli.main(["--version"])
    assert leave.value.code == 0
    assert capsys.readouterr().out == f"bytesched {bytesched.__version__}\n"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["docter"], "did you mean doctor?"),
        (["wave"], "is gone: what it measured"),
        (["--loud"], "--loud"),
    ],
)
def test_misuse_is_code_2(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leave:
        cli.main(argv)
    assert leave.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_command_has_a_main_with_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert callable(importlib.import_module(cli.COMMANDS[name].module).main)
    with pytest.raises(SystemExit) as leave:
        cli.main([name, "--help"])
    assert leave.value.code == 0
    assert f"usage: bytesched {name}" in capsys.readouterr().out


def test_arguments_and_exit_code_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Sequence[str]] = []

    def command(argv: Sequence[str]) -> int:
        seen.append(argv)
        return 7

    _command(monkeypatch, command)
    assert cli.main(["probe", "--help", "x"]) == 7
    assert seen == [["--help", "x"]]


def test_a_named_error_is_one_line_and_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(_: Sequence[str]) -> int:
        raise PluginError("no such model")

    _command(monkeypatch, command)
    assert cli.main(["probe"]) == 1
    assert capsys.readouterr().err == "bytesched probe: no such model\n"


def test_any_other_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(_: Sequence[str]) -> int:
        raise ZeroDivisionError

    _command(monkeypatch, command)
    with pytest.raises(ZeroDivisionError):
        cli.main(["probe"])


def test_interrupt_is_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(_: Sequence[str]) -> int:
        raise KeyboardInterrupt

    _command(monkeypatch, command)
    assert cli.main(["probe"]) == 130


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


def test_module_runs_as_the_command() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "bytesched", "--version"],
        capture_output=True,
        text=True,
        timeout=250,
        check=True,
    )
    assert run.stdout == f"bytesched {bytesched.__version__}\n"
