"""Where the time of a pass goes, told to the observers of wrapped models; or to nobody."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns
from typing import Literal

from torch import Tensor

from bytesched.observe import Observers

from ..planned.session import PlannedSession
from ..registry import sessions

#: what a stretch of time goes to
Kind = Literal["aggregation", "transformation", "halo"]


class Laps:
    """A clock that says what each stretch since the last one went to.

    Args:
        observers: of whoever wants to know; empty costs nothing.
    """

    def __init__(self, observers: Sequence[Observers]) -> None:
        self._observers = observers
        self._at_ns = perf_counter_ns() if observers else 0

    def lap(self, kind: Kind) -> None:
        """What has passed since the last call, or since the beginning, went to ``kind``."""
        if not self._observers:
            return
        now_ns = perf_counter_ns()
        for observers in self._observers:
            observers.on_span("graph", kind, self._at_ns, now_ns)
        self._at_ns = now_ns

    def watch_backward(self, y: Tensor, kind: Kind) -> None:
        """The same for the backward pass of the operation that has made ``y``."""
        if self._observers and (node := y.grad_fn) is not None:
            node.register_prehook(lambda _: self._begin())
            node.register_hook(lambda *_: self.lap(kind))

    def _begin(self) -> None:
        self._at_ns = perf_counter_ns()


def laps() -> Laps:
    """A clock that begins now, for the sessions of this process that are traced."""
    return Laps(
        [
            session.observers
            for session in sessions()
            if isinstance(session, PlannedSession) and session.observers
        ]
    )
