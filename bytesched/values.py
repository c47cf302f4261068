"""What users write, brought to the type it stands for.

Every parser raises `ValueError` whose message ends the sentence "<field> = <value>: ...".
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Collection

AUTOMATIC = 0

_MIN_SIZE_BYTES = 16
#: characters of a value in a message
_MOST_SHOWN = 80
_MAX_SIZE_BYTES = 1 << 40
_MAX_TIMEOUT_S = 30 * 24 * 3600.0
_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
}
_SIZE = re.compile(r"([+-]?[0-9.][0-9_.]*(?:e[+-]?[0-9]+)?)\s*([a-z]*)")
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


def nearest(name: str, known: Collection[str]) -> str:
    """Return the sentence that ends the message about an unknown name."""
    meant = closest(name, known)
    return f"; did you mean {meant}?" if meant else f"; known: {', '.join(known)}"


def closest(name: str, known: Collection[str]) -> str:
    """Which of ``known`` may be meant by ``name``; empty if none is like it."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return close[0] if close else ""


def shown(value: object) -> str:
    """Return `value` as an error message shows it: cut where it is long."""
    try:
        text = repr(value)
    except ValueError:
        # A whole number with more digits than Python writes out.
        return "a number with thousands of digits"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}... ({len(text)} characters)"


def parse_size(value: object) -> int:
    """Return a size in bytes from an int, a whole float, or text such as "512KiB" or "1MB".

    KB, MB, GB are powers of 1000 and KiB, MiB, GiB powers of 1024; case does not matter; "auto"
    is 0.
    """
    number, unit = _number_and_unit(value)
    if unit not in _UNITS:
        raise ValueError(f"the unit {unit!r} is none of B, KB, MB, GB, KiB, MiB, GiB")
    size = number * _UNITS[unit]
    if isinstance(size, float) and not math.isfinite(size):
        raise ValueError("not a finite number of bytes")
    if size != int(size):
        raise ValueError(f"comes to {size} bytes, which is no whole number")
    if size < 0:
        raise ValueError("a size cannot be negative; 0 means automatic")
    if AUTOMATIC < size < _MIN_SIZE_BYTES:
        raise ValueError(
            f"under {_MIN_SIZE_BYTES} bytes, which the widest dtype needs for one element; "
            "0 means automatic"
        )
    if size > _MAX_SIZE_BYTES:
        raise ValueError(f"above {_MAX_SIZE_BYTES} bytes (1 TiB); sizes are in bytes")
    return int(size)


def _number_and_unit(value: object) -> tuple[float, str]:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value, ""
    if isinstance(value, str):
        text = value.strip().lower()
        if text == "auto":
            return AUTOMATIC, ""
        match = _SIZE.fullmatch(text)
        if match:
            try:
                return float(match[1]), match[2]
            except ValueError:
                pass
    raise ValueError('not a size; write bytes or a unit, such as 524288, "512KiB" or "1MB"')


def parse_flag(value: object) -> bool:
    """Return a switch."""
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError("not a switch; write 1 or 0, true or false")


def parse_optional_flag(value: object) -> bool | None:
    """Return a switch, or None where the choice is left to bytesched."""
    if value is None or str(value).strip().lower() in {"auto", "none", ""}:
        return None
    return parse_flag(value)


def parse_timeout(value: object) -> float:
    """Return a time in seconds, above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError("not a number of seconds")
    try:
        seconds = float(value)
    except (ValueError, OverflowError):
        raise ValueError("not a number of seconds") from None
    if not 0 < seconds <= _MAX_TIMEOUT_S:
        raise ValueError(f"must be above 0 and at most {_MAX_TIMEOUT_S:.0f} seconds (30 days)")
    return seconds


def parse_name(value: object) -> str:
    """Return a name that is not empty."""
    text = str(value).strip()
    if not text:
        raise ValueError("empty")
    return text


def parse_path(value: object) -> str:
    """Return the path of a file or folder; empty means none."""
    if isinstance(value, (str, os.PathLike)):
        return os.fspath(value)
    raise ValueError("not a path")


def whole_number(least: int, most: int) -> Callable[[object], int]:
    """Return a parser that takes whole numbers from `least` to `most`."""

    def parse(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ValueError("not a whole number")
        try:
            number = int(value.strip()) if isinstance(value, str) else int(value)
        except (ValueError, OverflowError):
            raise ValueError("not a whole number") from None
        if isinstance(value, float) and number != value:
            raise ValueError("not a whole number")
        if not least <= number <= most:
            raise ValueError(f"must be from {least} to {most}")
        return number

    return parse


def one_of(*choices: str) -> Callable[[object], str]:
    """Return a parser that takes these names, in any case."""

    def parse(value: object) -> str:
        text = str(value).strip()
        for choice in choices:
            if text.lower() == choice.lower():
                return choice
        raise ValueError(f"none of {', '.join(choices)}")

    return parse


def size_text(nbytes: int) -> str:
    """Return a size as people read it, such as "256 KiB" or "12.2 MiB"."""
    if nbytes < 1 << 20:
        return f"{nbytes / 1024:.4g} KiB"
    return f"{nbytes / (1 << 20):.4g} MiB"
