"""What was left as it was, and why: said once, and again at the end of a script."""

from __future__ import annotations

import logging

__all__ = ["leave", "left", "name_of_ddp", "name_of_horovods"]

log = logging.getLogger("bytesched")

#: names of models and stores, with the reason
_left: dict[tuple[str, str], None] = {}


def leave(name: str, why: str, level: int = logging.INFO) -> None:
    """Says, once, why what has this ``name`` is left as it was."""
    if (name, why) not in _left:
        _left[name, why] = None
        log.log(level, "%s: left as it was: %s", name, why)


def left() -> list[str]:
    """All of it, in the order in which it was left."""
    return [f"{name}: {why}" for name, why in _left]


def name_of_ddp(module: object) -> str:
    """What the DDP of ``module`` is called in messages."""
    return f"DistributedDataParallel of {type(module).__name__}"


def name_of_horovods(optimizer: object) -> str:
    """The same for an optimizer of Horovod's."""
    return f"Horovod's {type(optimizer).__name__}"
