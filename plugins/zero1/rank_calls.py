"""What the ranks of a session ask each other while it runs."""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeAlias

import torch
from torch.serialization import default_restore_location

from bytesched.errors import (
    BytesschedError,
    PeerLost,
    PluginError,
    SchedulerTimeout,
    TransportError,
)

from ..dependency.progress import Progress

__all__ = ["Ask", "gathered", "packed", "packed_error", "unpacked"]

#: asks ranks a question each; with a name for what is asked
Ask: TypeAlias = Callable[[Mapping[int, bytes], str], Iterator[tuple[int, bytes]]]

_CPU: Final = torch.device("cpu")

#: the kind of a message that is no error
_VALUE: Final = ""
#: those that keep their kind on the way; of two that fit, the first
_ERRORS: Final = (PeerLost, SchedulerTimeout, TransportError, PluginError, BytesschedError)


def gathered(
    progress: Progress,
    ask: Ask,
    kind: str,
    questions: Mapping[int, Any],
    what: str,
    device: torch.device = _CPU,
) -> dict[int, Any]:
    """The answers of all ranks to their questions of a kind, with a deadline. The user's thread.

    What other ranks have on their GPU comes to ``device``.

    Raises what a rank answers if that is an error.
    """
    found: dict[int, Any] = {}
    task = f"{what} of ranks {', '.join(map(str, sorted(questions)))}"

    lost: list[BytesschedError] = []

    def value_of(answer: bytes) -> Any:
        try:
            return unpacked(answer, device)
        except BytesschedError as error:
            return error

    def ask_all() -> None:
        asked = {rank: packed((kind, question)) for rank, question in questions.items()}
        try:
            # All of them, whatever one has answered: the next question must not find these.
            for rank, answer in ask(asked, task):
                value = value_of(answer)
                with progress.lock:
                    found[rank] = value
                    progress.notify()
        except BytesschedError as error:
            with progress.lock:
                lost.append(error)
                progress.notify()

    # In a thread: a wait for a message cannot be interrupted.
    threading.Thread(target=ask_all, name="bytesched-ask", daemon=True).start()
    progress.wait(lambda: bool(lost) or len(found) == len(questions), task)
    for answer in (*lost, *found.values()):
        if isinstance(answer, BaseException):
            raise answer
    return found


def packed(value: Any) -> bytes:
    """Bytes of tensors and plain values, in lists, tuples and dicts, for another rank."""
    return _saved((_VALUE, value))


def packed_error(error: BytesschedError) -> bytes:
    """Bytes of an error that another rank raises."""
    kind = next(kind for kind in _ERRORS if isinstance(error, kind))
    return _saved((kind.__name__, str(error)))


def unpacked(content: bytes, device: torch.device = _CPU) -> Any:
    """What another rank of this job has packed; what is not on the CPU there, on ``device``.

    Nothing of it is executed: raises PluginError for anything but tensors and plain values. Raises
    the error that was packed, if one was.
    """

    def here(storage: Any, location: str) -> Any:
        # Of a GPU, the number is another rank's.
        return default_restore_location(storage, "cpu" if location == "cpu" else str(device))

    try:
        kind, value = torch.load(io.BytesIO(content), map_location=here, weights_only=True)
    except pickle.UnpicklingError as error:
        raise PluginError(
            "another rank's answer contains values other than tensors, numbers, texts and "
            "containers of them, which are not accepted from a network "
            f"({str(error).splitlines()[0]}); with shard=True an optimizer's state must consist "
            "of those"
        ) from error
    if kind == _VALUE:
        return value
    raise next(known for known in _ERRORS if known.__name__ == kind)(value)


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
