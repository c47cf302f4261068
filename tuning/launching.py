"""The command line of a training, changed so that its script runs under `bytesched run`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

__all__ = ["first_argument", "runs_bytesched", "under_run"]

_PYTHON: Final = re.compile(r"python(\d+(\.\d+)*)?")
#: launchers that start `-m MODULE` on every rank as Python does
_LAUNCHERS: Final = frozenset({"torchrun", "accelerate"})
#: those among their options after which they start a program of any kind
_ANY_PROGRAM: Final = ("--no-python", "--no_python")
#: the same, started by `python -m`
_LAUNCHER_MODULES: Final = frozenset({"torch.distributed.run", "accelerate.commands.launch"})
#: a launcher that puts an option of its own in front of those of the script
_INTRUDER: Final = "torch.distributed.launch"
_MODULE_OPTIONS: Final = ("-m", "--module")
#: options of the interpreter that take a value of their own
_WITH_VALUE: Final = frozenset({"-X", "-W", "--check-hash-based-pycs"})


def runs_bytesched(command: Sequence[str]) -> bool:
    """Whether the command itself starts bytesched: `run`, `bench` or another of its commands."""
    started = pairwise(command)
    return "bytesched" in (Path(word).name for word in command) or any(
        option in _MODULE_OPTIONS and module.partition(".")[0] == "bytesched"
        for option, module in started
    )


def under_run(command: Sequence[str]) -> list[str] | None:
    """The same command with its script under `bytesched run`; None if no script is found in it.

    What stands before `python`, torchrun or another launcher (mpirun, horovodrun, srun, env, …) is
    kept as it is.
    """
    for at, word in enumerate(command):
        name = Path(word).name
        if name in _LAUNCHERS:
            return _launched(command, at + 1)
        if _PYTHON.fullmatch(name):
            return _interpreted(command, at + 1)
    return None


def first_argument(command: Sequence[str], at: int) -> int:
    """Where the options of an interpreter end, which begin at `at`."""
    while at < len(command) and command[at][:1] == "-" and command[at] not in ("-m", "-c", "-"):
        at += 2 if command[at] in _WITH_VALUE else 1
    return at


def _interpreted(command: Sequence[str], at: int) -> list[str] | None:
    """The same; options of the interpreter begin at `at`."""
    at = first_argument(command, at)
    word, module = [*command[at : at + 2], "", ""][:2]
    if word == "-m":
        if module in _LAUNCHER_MODULES:
            return _launched(command, at + 2)
        return None if module == _INTRUDER else _inserted(command, at)
    if Path(word).name in _LAUNCHERS:
        return _launched(command, at + 1)
    return _inserted(command, at) if word and word[0] != "-" else None


def _launched(command: Sequence[str], at: int) -> list[str] | None:
    """The same; options of a launcher begin at `at`, and not all of them are known here."""
    is_python = True
    for index in range(at, len(command)):
        word = command[index]
        is_python = is_python and word not in _ANY_PROGRAM
        if _PYTHON.fullmatch(Path(word).name):
            return _interpreted(command, index + 1)
        if not is_python:
            continue
        if word in _MODULE_OPTIONS:
            following = command[index + 1 : index + 2]
            # An option stands between it and its module: which word that is, is not known.
            return None if not following or following[0][:1] == "-" else _inserted(command, index)
        if word.endswith(".py"):
            return _inserted(command, index)
    return None


def _inserted(command: Sequence[str], at: int) -> list[str]:
    program = list(command[at:])
    if program[0] in _MODULE_OPTIONS:
        program[0] = "-m"
    return [*command[:at], "-m", "bytesched", "run", *program]
