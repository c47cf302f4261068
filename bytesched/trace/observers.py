"""The observers that a configuration asks for."""

from __future__ import annotations

from typing import Protocol

from bytesched.config import Config
from bytesched.observe import Observers

__all__ = ["observers_here", "observers_of"]


class _Clocked(Protocol):
    rank: int

    def clock_offset_ns(self) -> int: ...


def observers_of(ranks: _Clocked, config: Config) -> Observers:
    """The observers of one session; collective."""
    if not config.timeline:
        return Observers()
    return observers_here(ranks.rank, config, clock_offset_ns=ranks.clock_offset_ns())


def observers_here(rank: int, config: Config, *, clock_offset_ns: int = 0) -> Observers:
    """The observers of one session; by this host's own clock, unless its offset is known."""
    if not config.timeline:
        return Observers()
    from bytesched.trace.timeline import Timeline

    return Observers([Timeline(config.timeline, rank=rank, clock_offset_ns=clock_offset_ns)])
