"""Horovod's settings, as Horovod itself reads them from the environment when it starts."""

from __future__ import annotations

import re
from typing import Final

from bytesched.config import horovod_variable

__all__ = ["CACHE_CAPACITY", "autotunes", "cache_capacity", "is_elastic", "is_number", "number"]

#: operations that it remembers if nothing else is said
CACHE_CAPACITY: Final = 1024

_NUMBER: Final = re.compile(r"\s*[+-]?\d+(\.\d*)?")


def number(name: str, default: float) -> float:
    """Return the number in `HOROVOD_<name>`.

    A value is cut off where it stops being a number, and is 0 if it does not begin with one.
    """
    text = horovod_variable(name)
    if not text:
        return default
    found = _NUMBER.match(text)
    return float(found.group()) if found else 0.0


def is_number(name: str) -> bool:
    """Return whether the whole of `HOROVOD_<name>` is a number, or nothing."""
    text = horovod_variable(name)
    return not text or _NUMBER.fullmatch(text.rstrip()) is not None


def cache_capacity() -> int:
    """Return how many operations Horovod remembers from one step to the next."""
    return int(number("CACHE_CAPACITY", CACHE_CAPACITY))


def autotunes() -> bool:
    """Return whether Horovod's own autotuner runs."""
    return number("AUTOTUNE", 0) > 0


def is_elastic() -> bool:
    """Return whether ranks may come and go."""
    return number("ELASTIC", 0) > 0
