"""What the parts of one session share."""

from __future__ import annotations

from dataclasses import dataclass

from bytesched.observe import Observers

from ..figures.meter import Meter
from ..routes.backend import Backend
from ..routes.streams import Streams
from .progress import Progress

__all__ = ["Context"]


@dataclass(frozen=True, eq=False)
class Context:
    """Of one session, for its whole life."""

    backend: Backend
    progress: Progress
    streams: Streams
    meter: Meter
    observers: Observers
