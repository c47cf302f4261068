"""What the picture of an iteration shows: one iteration of a trace and the next forward pass."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bytesched.trace.intervals import Interval, subtract, union
from bytesched.trace.reading import Iteration, Span, Trace

__all__ = ["IterationView", "view_iteration"]

#: Two spans that touch may lie this far apart in the file.
ROUNDING_MS = 0.002
#: How much of the next iteration to show, as a share of this one.
MOST_OF_NEXT = 0.5


@dataclass(frozen=True, slots=True)
class IterationView:
    """An iteration and the next forward pass, in ms since the step before it returned."""

    name: str
    iteration: Iteration
    #: when the next iteration's backward pass begins, or the picture ends before
    end_ms: float
    forward: list[Interval]
    backward: list[Interval]
    update: list[Interval]
    wait: list[Interval]
    #: when each transfer had the link, and its part of the model: 0 is the front, 1 the back
    link: list[tuple[Interval, Interval]]

    @property
    def step_ms(self) -> float:
        """Length of the iteration, when its step returned."""
        return self.iteration.step_ms


def view_iteration(trace: Trace, name: str) -> IterationView:
    """Return the iteration of median length; the one after it must be in the trace as well.

    Only the later half of the iterations counts: in the first ones, nothing is planned yet.
    """
    iterations = trace.iterations()
    if len(iterations) < 2:
        raise ValueError(f"the trace of {name} must hold at least three steps")
    later = iterations[(len(iterations) - 1) // 2 : -1]
    by_length = sorted(later, key=lambda iteration: iteration.step_ms)
    shown = by_length[(len(by_length) - 1) // 2]
    following = iterations[iterations.index(shown) + 1]
    next_backward = trace.intervals("backward", following.start_ms, following.end_ms)
    end_ms = next_backward[0][0] if next_backward else following.end_ms
    end_ms = min(end_ms, shown.end_ms + MOST_OF_NEXT * shown.step_ms)

    def shifted(spans: Iterable[Interval]) -> list[Interval]:
        return [(a - shown.start_ms, b - shown.start_ms) for a, b in union(spans, gap=ROUNDING_MS)]

    def track(name: str) -> list[Interval]:
        return trace.intervals(name, shown.start_ms, end_ms)

    wait = trace.waits(shown.start_ms, end_ms)
    return IterationView(
        name=name,
        iteration=shown,
        end_ms=end_ms - shown.start_ms,
        forward=shifted(subtract(track("forward"), wait)),
        backward=shifted(subtract(track("backward"), wait)),
        update=shifted(track("update")),
        wait=shifted(wait),
        link=_link(trace.track("send"), shown.start_ms, end_ms),
    )


def _link(sends: list[Span], start_ms: float, end_ms: float) -> list[tuple[Interval, Interval]]:
    """Return when each transfer had the link: of several in flight, the one that ends first."""
    chunks = 1 + max((int(span.args.get("chunk", 0)) for span in sends), default=0)
    turns: list[tuple[Interval, Interval]] = []
    free_ms = start_ms
    for span in sorted(sends, key=lambda span: span.end_ms):
        begin_ms = max(span.start_ms, free_ms)
        finish_ms = min(span.end_ms, end_ms)
        if finish_ms > begin_ms:
            chunk = int(span.args.get("chunk", 0))
            # They count as backward computes them.
            part = ((chunks - chunk - 1) / chunks, (chunks - chunk) / chunks)
            turns.append(((begin_ms - start_ms, finish_ms - start_ms), part))
            free_ms = finish_ms
    return turns
