"""What a call ends with, as text for a test in another process."""

from __future__ import annotations

from collections.abc import Callable

from bytesched.errors import BytesschedError


def raised(call: Callable[[], object], kind: type[BaseException] = BytesschedError) -> str:
    """The class and the text of the error, if it is of the ``kind``; empty if there is none."""
    try:
        call()
    except kind as error:
        return f"{type(error).__name__}: {error}"
    return ""
