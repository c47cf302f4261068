"""What makes a script wait: the line of it that reads what is still on its way."""

from __future__ import annotations

import contextlib
import functools
import os
import site
import sys
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter_ns
from traceback import walk_stack
from typing import Final

import torch

#: time for looking at stacks, of one model: enough for its first steps
_BUDGET_NS: Final = 20_000_000
#: a line that reads this share of all gradients reads them all
_ALL: Final = 0.9

_TORCH: Final = os.path.dirname(torch.__file__) + os.sep
#: files whose lines are no user's
_NOT_USERS: Final = (
    _TORCH,
    os.path.dirname(str(sys.modules["bytesched"].__file__)) + os.sep,
    # Where plugins are linked into the package, and not part of it.
    str(Path(__file__).resolve().parents[1]) + os.sep,
    contextlib.__file__,
    functools.__file__,
    # Around what torch calls deprecated.
    str(sys.modules["typing_extensions"].__file__),
    "<",
)
#: torch's way to the class of a tensor, which no user calls
_OVERRIDES: Final = torch.overrides.__file__
#: what decorators call their own function
_WRAPPERS: Final = frozenset({"decorate_context", "inner", "wrapper", "wrapped"})


@dataclass
class _Cause:
    waited_ns: int = 0
    #: what was read
    names: set[str] = field(default_factory=set)
    #: norms of all gradients were asked for, which wait for half of what is sent
    asked: bool = False


class Causes:
    """The lines of a script that read any of ``count`` gradients in front of its first steps."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._spent_ns = 0
        #: by what reads, and where
        self._causes: dict[tuple[str, str], _Cause] = {}

    def read(self, name: str, waited_ns: int) -> None:
        """The gradient ``name`` is read, and was waited for; called from where that happens."""
        # Of every gradient in every iteration: most come when no more time is spent on it.
        if self._spent_ns <= _BUDGET_NS:
            self._cause(waited_ns).names.add(name)

    def asked(self, waited_ns: int) -> None:
        """As `read`, where norms of all gradients were asked for and waited for."""
        if self._spent_ns <= _BUDGET_NS:
            self._cause(waited_ns).asked = True

    def _cause(self, waited_ns: int) -> _Cause:
        """That of the user's line which is running."""
        began_ns = perf_counter_ns()
        cause = self._causes.setdefault(place(), _Cause())
        cause.waited_ns += waited_ns
        self._spent_ns += perf_counter_ns() - began_ns
        return cause

    @property
    def worst(self) -> str:
        """What made the script wait longest, in a few words; empty if nothing did."""
        waited = {key: cause for key, cause in self._causes.items() if cause.waited_ns}
        if not waited:
            return ""
        function, line = max(waited, key=lambda key: waited[key].waited_ns)
        cause = self._causes[function, line]
        if cause.asked:
            return f"{function or 'the script'} asks for norms of all gradients ({line})"
        names = cause.names
        what = "all gradients" if len(names) >= _ALL * self._count else "gradients"
        if len(names) == 1 < self._count:
            (what,) = (f"{name}.grad" for name in names)
        return f"{function or 'the script'} reads {what} ({line})"


def place() -> tuple[str, str]:
    """The function of torch that the user's line calls, or nothing; and that line."""
    function = ""
    for frame, line in walk_stack(sys._getframe(1)):
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if not file.startswith(_NOT_USERS) and name != "__torch_function__":
            return function, f"{_shortened(file)}:{line}"
        is_called = not name.startswith("_") and name not in _WRAPPERS and file != _OVERRIDES
        if file.startswith(_TORCH) and is_called:
            function = name
    return function, "in a thread of a framework"


def _shortened(file: str) -> str:
    """From the package on, for what is installed; else the name alone."""
    for folder in site.getsitepackages():
        if file.startswith(folder):
            return os.path.relpath(file, folder)
    return os.path.basename(file)
