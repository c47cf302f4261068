"""When something was under way: for figures, traces, and torch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from time import perf_counter_ns
from typing import Any, Final

from torch.autograd import profiler

from bytesched.observe import Observers


class Spans:
    """The times of operations, by number. Threads of a carrier note ends."""

    def __init__(self) -> None:
        self.began_ns: dict[int, int] = {}
        self._ended_ns: dict[int, int] = {}

    def begin(self, number: int, at_ns: int) -> None:
        """One has begun."""
        self.began_ns[number] = at_ns

    def end(self, number: int, at_ns: int) -> None:
        """One has ended."""
        self._ended_ns[number] = at_ns

    @property
    def is_complete(self) -> bool:
        """Whether the end of everything is known."""
        return bool(self.began_ns) and self._ended_ns.keys() == self.began_ns.keys()

    def busy_ns(self) -> int:
        """For how long something was under way."""
        busy_ns = last_ns = 0
        spans = sorted((at_ns, self._ended_ns[number]) for number, at_ns in self.began_ns.items())
        for began_ns, ended_ns in spans:
            busy_ns += max(0, ended_ns - max(began_ns, last_ns))
            last_ns = max(last_ns, ended_ns)
        return busy_ns

    def __repr__(self) -> str:
        return f"<Spans: {len(self._ended_ns)} of {len(self.began_ns)} have ended>"


class Carried:
    """When something of a round was under way, for figures and traces."""

    def __init__(self, observers: Observers) -> None:
        self._observers = observers
        self.spans = Spans()

    def round_begins(self) -> None:
        """What is carried from now on is of another round."""
        self.spans = Spans()

    def begin(
        self, begin: Callable[[], Any], name: str, nbytes: int, number: int | None = None
    ) -> Any:
        """The work that ``begin`` returns.

        Args:
            number: that of a chunk, or of its way back, negative; None: counted.
        """
        spans = self.spans
        number = len(spans.began_ns) if number is None else number
        spans.begin(number, perf_counter_ns())
        work = begin()
        work.get_future().add_done_callback(partial(self._ended, spans, number, name, nbytes))
        return work

    def _ended(self, spans: Spans, number: int, name: str, nbytes: int, future: object) -> None:
        now_ns = perf_counter_ns()
        spans.end(number, now_ns)
        if self._observers.are_any:
            args = {"bytes": nbytes, "chunk": number if number >= 0 else ~number}
            self._observers.on_span("send", name, spans.began_ns[number], now_ns, args)


_NONE: Final = nullcontext()


def span(name: str) -> AbstractContextManager[Any]:
    """What happens inside is shown as ``name`` by a profiler that is on, on any thread."""
    is_on: bool = profiler._is_profiler_enabled
    return profiler.record_function(name) if is_on else _NONE
