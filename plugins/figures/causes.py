"""What makes a script wait: the line of it that reads what is still on its way."""

from __future__ import annotations

import contextlib
import functools
import os
import site
import sys
from collections import Counter, defaultdict
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


#: in place of names of gradients: norms of all were asked for, which wait for half of what is sent
_NORMS: Final = ""


class Causes:
    """The lines of a script that read any of ``count`` gradients in front of its first steps."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._spent_ns = 0
        #: by what reads, and where: for how long, and which gradients
        self._waited_ns: Counter[tuple[str, str]] = Counter()
        self._names: defaultdict[tuple[str, str], set[str]] = defaultdict(set)

    def read(self, name: str, waited_ns: int) -> None:
        """The gradient ``name`` is read, and was waited for; called from where that happens."""
        # Of every gradient in every iteration: most come when no more time is spent on it.
        if self._spent_ns <= _BUDGET_NS:
            began_ns = perf_counter_ns()
            where = place()
            self._waited_ns[where] += waited_ns
            self._names[where].add(name)
            self._spent_ns += perf_counter_ns() - began_ns

    def asked(self, waited_ns: int) -> None:
        """As `read`, where norms of all gradients were asked for and waited for."""
        self.read(_NORMS, waited_ns)

    @property
    def worst(self) -> str:
        """What made the script wait longest, in a few words; empty if nothing did."""
        for where, waited_ns in self._waited_ns.most_common(1):
            if waited_ns:
                function, line = where
                return f"{function or 'the script'} {self._what(self._names[where])} ({line})"
        return ""

    def _what(self, names: set[str]) -> str:
        if _NORMS in names:
            return "asks for norms of all gradients"
        if len(names) == 1 < self._count:
            return f"reads {min(names)}.grad"
        return "reads all gradients" if len(names) >= _ALL * self._count else "reads gradients"


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
