"""All-to-alls of an unchanged script: each is an urgent section, from its call to its end."""

from __future__ import annotations

import functools
import sys
from typing import Any, Final

from bytesched.urgency import begin

__all__ = ["mark_all_to_alls"]

_NAMES: Final = ("all_to_all_single", "all_to_all")


def mark_all_to_alls(module: Any) -> None:
    """Replace those of ``torch.distributed.distributed_c10d``, before anything refers to them.

    A forward or backward pass waits for what they bring. They cost two counts while nothing is
    wrapped. One that is asynchronous ends with its work, and on a GPU, where a call returns as soon
    as it is queued, one that is not ends with its call.
    """
    package = sys.modules.get("torch.distributed")
    for name in _NAMES:
        plain = getattr(module, name)
        setattr(module, name, _marked(plain))
        if getattr(package, name, None) is plain:
            # It was imported before we were asked to watch.
            setattr(package, name, getattr(module, name))


def _marked(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        section = begin(function.__name__)
        work = None
        try:
            work = function(*args, **kwargs)
        finally:
            # None: it is over, or has raised, or this rank is not of its group.
            if work is None:
                section.end()
        if work is not None:
            work.get_future().add_done_callback(lambda _: section.end())
        return work

    return call
