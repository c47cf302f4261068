"""Streams of a device on which a model computes, and what one of them owes the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bytesched.errors import PluginError

from .buckets import Chunk


def refuse_capture() -> None:
    """Raises `PluginError` while a CUDA graph is being captured."""
    if torch.cuda.is_current_stream_capturing():
        raise PluginError(
            "a CUDA graph is being captured over a wrapped model: its replays would bypass "
            "everything that waits for an update. Make graphed callables before wrap, or "
            "capture after unwrap"
        )


class Streams:
    """Those that were seen, in hooks, gates and steps. Nothing of ours runs on another one."""

    def __init__(self) -> None:
        #: by handle
        self._seen: dict[int, Any] = {}

    def see(self) -> Any:
        """The current stream, which is known from now on."""
        stream = torch.cuda.current_stream()
        return self._seen.setdefault(stream.cuda_stream, stream)

    def hand_over(self, ready: Sequence[Chunk], following: Sequence[Chunk]) -> None:
        """``following`` are about to be issued here; ``ready`` became so here.

        What became ready in another hook may have been computed on another stream.
        """
        stream = self.see()
        held_back = [chunk for chunk in ready if chunk not in following]
        if held_back:
            event = stream.record_event()
            for chunk in held_back:
                chunk.ready = stream, event
        for chunk in following:
            if chunk.ready is not None:
                elsewhere, event = chunk.ready
                chunk.ready = None
                if elsewhere is not stream:
                    stream.wait_event(event)

    def join(self) -> None:
        """What is queued here next comes after all that was queued elsewhere."""
        stream = self.see()
        for other in self._others(stream):
            stream.wait_event(other.record_event())

    def part(self) -> None:
        """What is queued elsewhere next comes after all that was queued here."""
        stream = self.see()
        if others := self._others(stream):
            event = stream.record_event()
            for other in others:
                other.wait_event(event)

    def _others(self, stream: Any) -> list[Any]:
        # Nearly always there are none.
        return [other for other in self._seen.values() if other is not stream]
