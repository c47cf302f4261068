"""Copies of the script that it starts itself, as ranks: they run under `bytesched run` as well.

Some trainers start the other ranks with `subprocess`, by the command line that started this one.
Only such copies are meant: other scripts and other commands are what they were.
"""

from __future__ import annotations

import functools
import inspect
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import bytesched

#: finds this very package, wherever the child looks for others
_START: Final = (
    "import sys; sys.path.insert(0, {root!r}); import bytesched.commands.run as command; "
    "del sys.path[0]; command.run_copy(sys.argv[1:])"
)
#: where options of the interpreter end, and those that take a value of their own
_ENDS: Final = ("-m", "-c", "-")
_WITH_VALUE: Final = ("-X", "-W", "--check-hash-based-pycs")


def watch_copies(module: Any, program: str, *, is_module: bool) -> None:
    """From now on `module`, which is `subprocess`, starts copies of `program` as this process was.

    Args:
        program: the path of the script, or the name of its module.
    """
    start = module.Popen.__init__
    parameters = inspect.signature(start)
    script = program if is_module else os.path.abspath(program)

    @functools.wraps(start)
    def __init__(self: Any, args: Any, *others: Any, **named: Any) -> None:
        try:
            ours = _under_run(args, script, _given(parameters, others, named), is_module=is_module)
            start(self, args if ours is None else ours, *others, **named)
        except BaseException as error:
            # A bare raise adds no frame: this one shall not show.
            error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
            raise
        self.args = args

    module.Popen.__init__ = __init__


def _given(
    parameters: inspect.Signature, others: Sequence[Any], named: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The arguments after the first, by name."""
    try:
        return parameters.bind(None, None, *others, **named).arguments
    except TypeError:
        # Popen is about to say so itself.
        return {"shell": True}


def _under_run(
    args: Any, script: str, given: Mapping[str, Any], *, is_module: bool
) -> list[str] | None:
    """What starts `args` under `bytesched run`; None if they do not start `script`."""
    if given.get("shell") or given.get("executable") or not isinstance(args, (list, tuple)):
        return None
    try:
        words = [os.fsdecode(word) for word in args]
        folder = os.fsdecode(given.get("cwd") or "")
    except TypeError:
        return None
    if not words or not _is_this_python(words[0]):
        return None
    first = 1
    while words[first : first + 1] and words[first][:1] == "-" and words[first] not in _ENDS:
        first += 2 if words[first] in _WITH_VALUE else 1
    if words[first : first + 1] == ["-m"]:
        names = [word.removesuffix(".__main__") for word in words[first + 1 : first + 2]]
        is_copy = is_module and names == [script.removesuffix(".__main__")]
    else:
        is_copy = (
            not is_module
            and first < len(words)
            and _is_same(os.path.join(folder, words[first]), script)
        )
    if not is_copy:
        return None
    root = str(Path(bytesched.__file__).parents[1])
    return [*words[:first], "-c", _START.format(root=root), *words[first:]]


def _is_this_python(program: str) -> bool:
    found = shutil.which(program)
    return found is not None and bool(sys.executable) and _is_same(found, sys.executable)


def _is_same(path: str, other: str) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:
        return False
