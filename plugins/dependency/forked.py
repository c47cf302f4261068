"""In a forked child no thread receives or updates anything."""

from __future__ import annotations

from typing import NoReturn

from bytesched.errors import PluginError

__all__ = ["refuse"]


def refuse(name: str) -> NoReturn:
    """``name`` is used in a forked child, where it will not come."""
    raise PluginError(
        f"{name!r} was outstanding when this process was forked, and nothing completes it here"
    )
