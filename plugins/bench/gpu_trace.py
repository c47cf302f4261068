"""An iteration of bytesched as its observers saw it, for `bytesched bench --gpu-ranks --trace`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bytesched.observe import Observer

__all__ = ["Spans", "traced"]


class Spans(Observer):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, str, int, int, dict[str, Any]]] = []
        self.ready: list[tuple[int, int]] = []

    def on_span(
        self,
        track: str,
        name: str,
        start_ns: int,
        end_ns: int,
        args: dict[str, Any] | None = None,
    ) -> None:
        self.spans.append((track, name, start_ns, end_ns, args or {}))

    def on_flow(self, phase: str, flow_id: int, track: str, at_ns: int) -> None:
        if phase == "s":
            self.ready.append((at_ns, flow_id))


def traced(seen: Spans, passes: Sequence[tuple[str, int]]) -> dict[str, list[Any]]:
    """An iteration in ms from the start of its backward pass, the first of these.

    Chunks with when they were ready, sent and there, gates with when the training thread came to
    them and went on, and passes with their starts; the last one is the end.
    """
    began_ns, until_ns = passes[0][1], passes[-1][1]

    def ms(at_ns: int) -> float:
        return round((at_ns - began_ns) / 1e6, 3)

    spans = sorted((s for s in seen.spans if began_ns <= s[2] < until_ns), key=lambda s: s[2])
    ready = {chunk: at_ns for at_ns, chunk in seen.ready if began_ns <= at_ns < until_ns}
    return {
        "chunks": [
            [name, ms(ready.get(args.get("chunk", -1), start)), ms(start), ms(end)]
            for track, name, start, end, args in spans
            if track == "send"
        ],
        "gates": [
            [name, ms(start), ms(end)] for track, name, start, end, _ in spans if track == "wait"
        ],
        "passes": [[name, ms(at_ns)] for name, at_ns in passes],
    }
