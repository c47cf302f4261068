"""What a call ends with, as text for a test in another process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from bytesched.errors import BytesschedError

if TYPE_CHECKING:
    from ranks import ExitedRank


def raised(call: Callable[[], object], kind: type[BaseException] = BytesschedError) -> str:
    """The class and the text of the error, if it is of the ``kind``; empty if there is none."""
    try:
        call()
    except kind as error:
        return f"{type(error).__name__}: {error}"
    return ""


def told(call: Callable[[], object], kind: type[BaseException] = BytesschedError) -> str:
    """The same, of a call that may end well."""
    return raised(call, kind) or "no error"


def leaving(call: Callable[[], object]) -> str:
    """What is raised, and what of Gloo stays open while the error is kept."""
    from rank_worker import gloo_threads, gloo_threads_left

    before = gloo_threads()
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the test looks at it
        left = gloo_threads_left(before)
        return f"{type(error).__name__}: {error}" + f" and left {left} threads" * bool(left)
    return "no error"


def prints_and_ends(
    call: Callable[[], object], kind: type[BaseException] = BytesschedError
) -> NoReturn:
    """Prints what it was told, and ends the process, in which others may still wait."""
    print(told(call, kind), flush=True)
    os._exit(0)


def check_survivors(
    ended: Sequence[ExitedRank], *said: str, victim: int = -1, code: int = -9
) -> None:
    """All but the ``victim``, whose exit code this is, printed a `PeerLost` with these words."""
    survivors = list(ended)
    dead = survivors.pop(victim)
    assert dead.code == code, dead.stderr
    for survivor in survivors:
        assert survivor.code == 0, survivor.stderr
        assert survivor.stdout.startswith("PeerLost: "), survivor
        assert all(text in survivor.stdout for text in said), survivor.stdout
