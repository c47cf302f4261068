"""A script or a module, run as if the interpreter itself had been started with it."""

from __future__ import annotations

import builtins
import io
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import SourceFileLoader
from types import CodeType, ModuleType, TracebackType
from typing import TypeVar

T = TypeVar("T")


def loaded(program: str, *, is_module: bool) -> Callable[[Sequence[str]], None]:
    """What runs a script, or a module, with arguments; the source of a script is read now.

    Raises `OSError`, or what is wrong with its source.
    """
    if is_module:
        return partial(_run_module, program)
    return partial(_run_file, program, _compiled(program))


def _compiled(path: str) -> CodeType:
    with io.open_code(path) as file:
        source = file.read()
    code: CodeType = _on_its_own(compile, source, _absolute(path), "exec", 0, True)
    return code


def _run_file(path: str, code: CodeType, arguments: Sequence[str]) -> None:
    """Run the code of a script as `python path arguments...` does."""
    sys.argv = [path, *arguments]
    _search_first(os.path.dirname(os.path.realpath(path)))
    main, absolute = _new_main(), _absolute(path)
    vars(main).update(__file__=absolute, __cached__=None)
    vars(main).update(__loader__=SourceFileLoader("__main__", absolute))
    _on_its_own(exec, code, vars(main))


def _run_module(name: str, arguments: Sequence[str]) -> None:
    """Run a module, or the `__main__` of a package, as `python -m name arguments...` does."""
    sys.argv = ["-m", *arguments]
    _search_first(os.getcwd())
    _new_main()
    # What the interpreter calls for -m. The public run_module() names a package otherwise, and
    # takes __main__ away while threads and atexit functions may still need it.
    _on_its_own(runpy._run_module_as_main, name)  # type: ignore[attr-defined]


def _absolute(path: str) -> str:
    """Return the path as the interpreter writes it into `__file__`: nothing is normalized."""
    return os.path.join(os.getcwd(), path)


def _search_first(folder: str) -> None:
    # With -P or -I, the first entry of the path is one of the ordinary ones.
    if not (getattr(sys.flags, "safe_path", False) or sys.flags.isolated):
        sys.path[0] = folder


def _new_main() -> ModuleType:
    """Put a new `__main__` in place of ours, for good: pickles look classes up in it."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main).update(__builtins__=builtins)
    if sys.version_info < (3, 14):
        vars(main).update(__annotations__={})
    return main


def _on_its_own(function: Callable[..., T], *arguments: object) -> T:
    """Call `function`; what it raises is shown by the interpreter, without our frames in it."""
    try:
        return function(*arguments)
    except SystemExit:
        raise
    except BaseException as error:
        _show_from(error.__traceback__ and error.__traceback__.tb_next)
        raise


def _show_from(first: TracebackType | None) -> None:
    """Let the excepthook that the script has, or has set, see the traceback from `first` on."""
    hook = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, _: TracebackType | None) -> None:
        sys.excepthook = hook
        sys.last_traceback = first
        hook(kind, error.with_traceback(first), first)

    sys.excepthook = show
