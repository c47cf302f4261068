"""Chunks on the wire: issued in one order on all ranks, landed when somebody needs them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from bytesched.errors import PluginError
from bytesched.share.turn import HELD, released

from ..failures import Failures
from ..figures.meter import Meter
from .buckets import Bucket, Chunk, Sent
from .coding import Coding
from .halves import Halves
from .planning import Planning
from .spans import span
from .wire import HOST, Wire

__all__ = ["Sending", "Streams", "refuse_capture"]


class Sending:
    """What one session has under way.

    Args:
        coding: brings chunks into the dtype of the wire; None: they are sent as they are.
    """

    def __init__(
        self,
        wire: Wire,
        failures: Failures,
        meter: Meter,
        planning: Planning,
        coding: Coding | None = None,
    ) -> None:
        self._wire = wire
        self._coding = coding
        self._failures = failures
        self._meter = meter
        self._planning = planning
        self._streams = Streams()
        #: whether a wait is only queued, on a stream of a device
        self.has_streams = wire.has_streams
        #: how many chunks of the plan have been issued in this round
        self._position = 0
        #: by index, those that are ready and not issued
        self._held_back: dict[int, Chunk] = {}
        #: buckets that were handed out and are not back
        self.buckets: list[Bucket] = []
        #: what carries gradients in two halves; None: they go whole
        self.halves: Halves | None = None

    def round_begins(self) -> None:
        """Chunks of a new round follow."""
        self._position = 0
        self._held_back.clear()
        if self.halves is not None:
            if self.halves.is_round_whole:
                # A rank that has joined, and begins no backward pass, has waited for nothing.
                self.hand_on()
            self.halves.round_begins()
        # A rank that has joined lands each round by itself.
        self.buckets = [bucket for bucket in self.buckets if bucket.is_under_way]

    def ready(self, chunks: Sequence[Chunk], *, is_last: bool) -> None:
        """Issues what is next and ready. In a hook of the reducer: nothing waits here.

        Args:
            is_last: no other chunks follow in this round.
        """
        self.buckets.append(chunks[0].bucket)
        held_back = self._held_back
        for chunk in chunks:
            chunk.work, chunk.landed_on = None, None
        if self._coding is not None:
            self._coding.open(chunks)
        if self.halves is not None:
            self.halves.start(chunks)
            if is_last:
                self.halves.all_started()
            return
        planning = self._planning
        for chunk in chunks:
            held_back[chunk.index] = chunk
        if planning.measured is not None:
            planning.ready(chunks)
        is_seen = planning.measured is not None or planning.observers.are_any
        order = planning.order
        if order is None:
            following = list(held_back.values())
            held_back.clear()
        else:
            following = []
            while self._position < len(order) and order[self._position] in held_back:
                following.append(held_back.pop(order[self._position]))
                self._position += 1
        if self.has_streams:
            self._streams.hand_over(chunks, following)
        for number, chunk in enumerate(following, 1):
            if self._coding is not None:
                self._coding.encode(chunk)
            chunk.work = (chunk.wire or self._wire).start(chunk.sent, chunk.key)
            is_end = is_last and number == len(following)
            if is_seen or is_end:
                planning.issued(chunk, is_last=is_end)

    def hand_to_owners(self, bucket: Bucket) -> None:
        """The same where sums go to owners, who carry them."""
        self.buckets.append(bucket)
        for chunk in bucket.chunks:
            chunk.work, chunk.landed_on = None, None

    def have_brought(self, bucket: Bucket) -> None:
        """Nobody waits for ``bucket`` any more, which owners had: it is here, or not wanted."""
        for chunk in bucket.chunks:
            chunk.landed_on = self._wire.stream() if self.has_streams else HOST

    def wait(self, chunks: Iterable[Sent], by: str) -> None:
        """What the calling thread does next comes after the sums of ``chunks``.

        Args:
            by: what makes it wait, for figures.

        Raises the first error of the session.
        """
        stream = self._wire.stream() if self.has_streams else HOST
        outstanding = [chunk for chunk in chunks if chunk.landed_on != stream]
        if not outstanding:
            return
        began = self._meter.moment()
        is_long = HELD and not self.has_streams and bool(self.outstanding(outstanding))
        with span("bytesched::wait"), released() if is_long else nullcontext():
            if self.halves is not None and self.halves.is_round_whole:
                # Nor may anything change what is still to be measured.
                self.hand_on()
            for chunk in outstanding:
                if chunk.landed_on == stream:
                    # A signal handler was quicker.
                    continue
                if chunk.work is None:
                    self._failures.check()
                    raise PluginError(
                        f"{chunk.name!r} was not sent on rank {self._wire.rank}: its round is not "
                        "complete, or its session has ended"
                    )
                try:
                    (chunk.wire or self._wire).wait(chunk.work, chunk.name)
                except Exception as error:  # noqa: BLE001 - it is raised, here and elsewhere
                    self._failures.raise_first(error)
                if self._coding is not None:
                    self._coding.decode(chunk)
                chunk.landed_on = stream
                if stream == HOST:
                    chunk.work = None
                if (self.has_streams or self._planning.awaited) and isinstance(chunk, Chunk):
                    self._planning.waited(chunk)
        self._meter.waited(by, began)

    def hand_on(self) -> None:
        """Returns when all first halves have ended, and the second ones are under way."""
        assert self.halves is not None
        try:
            self.halves.wait_for_sums()
        except Exception as error:  # noqa: BLE001 - it is raised, here and on the other rank
            self._failures.raise_first(error)

    def alone(self) -> AbstractContextManager[None]:
        """Around writes to gradients or parameters that kernels on other streams may use."""
        return self._apart() if self.has_streams else nullcontext()

    @contextmanager
    def _apart(self) -> Iterator[None]:
        self._streams.join()
        try:
            yield
        finally:
            self._streams.part()

    def land(self, bucket: Bucket, by: str) -> None:
        """Returns when the sum of ``bucket`` is there, and handed back."""
        if bucket.is_under_way:
            self.wait(bucket.chunks, by)
            with self.alone():
                bucket.hand_back()

    def land_all(self, by: str) -> None:
        """The same for everything that is under way."""
        for bucket in tuple(self.buckets):
            self.land(bucket, by)
        self.buckets = [bucket for bucket in self.buckets if bucket.is_under_way]

    def forget(self, buckets: Iterable[Bucket]) -> None:
        """Nothing of ``buckets`` is under way any more: works keep connections open."""
        chunks = [chunk for bucket in (*buckets, *self.buckets) for chunk in bucket.chunks]
        if not self.has_streams:
            # Who is told of the end of one shall be, while there is an interpreter.
            halves = () if self.halves is None else self.halves.works()
            works = (chunk.work for chunk in chunks if chunk.work is not None)
            self._wire.wait_left((*halves, *works))
        for chunk in chunks:
            chunk.work = None
        if self.halves is not None:
            self.halves.let_go()
        self.buckets.clear()
        self._held_back.clear()

    def disown(self) -> None:
        """In a forked child: what is under way will not come, and whoever reads it is told so."""
        for bucket in self.buckets:
            for chunk in bucket.chunks:
                chunk.work = None

    def outstanding(self, chunks: Iterable[Sent]) -> list[Sent]:
        """Those of ``chunks`` that have not come, as far as is known without waiting."""
        return [
            chunk
            for chunk in chunks
            if chunk.landed_on is None and (chunk.work is None or not chunk.work.is_completed())
        ]

    def outstanding_bytes(self, chunks: Iterable[Sent]) -> int:
        """How many bytes these have."""
        return sum([chunk.sent.nbytes for chunk in self.outstanding(chunks)])

    def __repr__(self) -> str:
        return f"<Sending: {len(self.buckets)} buckets under way>"


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


def refuse_capture() -> None:
    """Raises `PluginError` while a CUDA graph is being captured."""
    if torch.cuda.is_current_stream_capturing():
        raise PluginError(
            "a CUDA graph is being captured over a wrapped model: its replays would bypass "
            "everything that waits for an update. Make graphed callables before wrap, or "
            "capture after unwrap"
        )
