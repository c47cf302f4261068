"""How a rank that this package started ends: at once, whether it succeeded or raised."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn


def leave_after(main: Callable[[list[str]], int]) -> NoReturn:
    """Run ``main`` on the command line's arguments and end with what it returns, or with 1.

    A thread of Gloo's that lets go of an operation started in a backward pass needs the
    interpreter's lock (torch 2.13). In a process that ends in the ordinary way it now and then
    finds none, and aborts it.
    """
    try:
        exit_code = main(sys.argv[1:])
    except Exception:  # noqa: BLE001 - it is printed as the interpreter would
        sys.excepthook(*sys.exc_info())
        exit_code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
