"""Iterations as they were: when each chunk was ready, on its way, and first needed."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns
from typing import Any

from bytesched.observe import Observer
from bytesched.tunable import Recording, Send

from ..layout.plan import Plan
from ..layout.slots import Bundle

__all__ = ["Recorder"]

_S = 1e9
#: start and end
_Span = tuple[int, int]


class Recorder(Observer):
    """Listens to a session for a few iterations, on any of its threads.

    Args:
        plan: its chunks; nothing is found in iterations during which it is cut.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._cuts = plan.cuts
        self._spans: dict[str, list[_Span]] = {"forward": [], "backward": [], "wait": []}
        self._ready: list[tuple[int, int]] = []
        self._sends: list[tuple[int, int, int]] = []
        self._passed: list[tuple[int, tuple[Bundle, ...]]] = []

    def on_span(
        self,
        track: str,
        name: str,
        start_ns: int,
        end_ns: int,
        args: dict[str, Any] | None = None,
    ) -> None:
        if track == "queue" and args is not None:
            self._ready.append((start_ns, args["chunk"]))
        elif track == "send" and args is not None:
            self._sends.append((start_ns, end_ns, args["bytes"]))
        elif track in self._spans:
            self._spans[track].append((start_ns, end_ns))

    def passed(self, bundles: Sequence[Bundle]) -> None:
        """The forward pass has come to the parameters of these."""
        self._passed.append((perf_counter_ns(), tuple(bundles)))

    def recordings(self) -> tuple[Recording, ...]:
        """One for each iteration that was seen from its backward pass to the next forward pass."""
        if self._plan.cuts != self._cuts:
            return ()
        found = []
        backwards = self._spans["backward"]
        for number, (start_ns, _) in enumerate(backwards):
            later = [after for after, _ in backwards[number + 1 : number + 2]]
            end_ns = later[0] if later else start_ns
            forward = [span for span in self._spans["forward"] if start_ns < span[0] < end_ns]
            if forward:
                found.append(self._recording(start_ns, end_ns, forward[0]))
        return tuple(one for one in found if one is not None)

    def _recording(self, start_ns: int, end_ns: int, forward: _Span) -> Recording | None:
        chunks = self._plan.chunks
        releases = {
            chunk: (at_ns - start_ns) / _S
            for at_ns, chunk in self._ready
            if start_ns <= at_ns < end_ns
        }
        if len(releases) < len(chunks):
            return None
        sends = [
            Send(nbytes, (sent_ns - start_ns) / _S, (arrived_ns - start_ns) / _S)
            for sent_ns, arrived_ns, nbytes in sorted(self._sends)
            if start_ns <= sent_ns < end_ns
        ]
        return Recording(
            tuple(chunk.nbytes for chunk in chunks),
            tuple(releases[chunk.index] for chunk in chunks),
            self._forward_s(forward),
            tuple(sends),
        )

    def _forward_s(self, forward: _Span) -> tuple[float, ...]:
        """For each chunk, from its first use to that of the next one, without waiting."""
        start_ns, end_ns = forward
        waits = [span for span in self._spans["wait"] if start_ns <= span[0] < end_ns]

        def computed_s(at_ns: int) -> float:
            waited_ns = sum(min(until, at_ns) - since for since, until in waits if since < at_ns)
            return (at_ns - start_ns - waited_ns) / _S

        first_s: dict[int, float] = {}
        for at_ns, bundles in self._passed:
            if start_ns <= at_ns <= end_ns:
                for bundle in bundles:
                    for chunk in bundle.chunks:
                        first_s.setdefault(chunk.index, computed_s(at_ns))
        starts = [0.0]
        for chunk in self._plan.chunks[1:]:
            starts.append(max(starts[-1], first_s.get(chunk.index, 0.0)))
        ends = [*starts[1:], max(starts[-1], computed_s(end_ns))]
        return tuple(after - before for before, after in zip(starts, ends, strict=True))
