"""What the ranks of a session ask each other while it runs."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from bytesched.errors import BytesschedError
from bytesched.plugins.session.progress import Progress

__all__ = ["Ask", "gathered", "packed", "unpacked"]

#: asks a rank a question; with a name for what is asked
Ask: TypeAlias = Callable[[int, bytes, str], bytes]


def gathered(
    progress: Progress, ask: Ask, kind: str, questions: Mapping[int, Any], what: str
) -> dict[int, Any]:
    """The answers of all ranks to their questions of a kind, with a deadline. The user's thread.

    Raises what a rank answers if that is an error.
    """
    found: dict[int, Any] = {}
    task = f"{what} of ranks {', '.join(map(str, sorted(questions)))}"

    def ask_one(rank: int, question: Any) -> None:
        try:
            answer = unpacked(ask(rank, packed((kind, question)), task))
        except BytesschedError as error:
            answer = error
        with progress.changed:
            found[rank] = answer
            progress.notify()

    for item in questions.items():
        name = f"bytesched-ask-{item[0]}"
        threading.Thread(target=ask_one, args=item, name=name, daemon=True).start()
    progress.wait(lambda: len(found) == len(questions), task)
    for answer in found.values():
        if isinstance(answer, BaseException):
            raise answer
    return found


def packed(value: Any) -> bytes:
    """Bytes of plain values and tensors, for another rank."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpacked(content: bytes) -> Any:
    """What was packed by another rank of this job."""
    return torch.load(io.BytesIO(content), weights_only=False)
