"""Streams on which a model computes: what is queued on one of them, and read on others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from fake_cuda import CUDA, FakeCuda, FakeStream, after, fake_cuda
from torch import nn

from bytesched.errors import PluginError
from bytesched.plugins.planned.buckets import Bucket, Chunk
from bytesched.plugins.planned.cutting import Cut
from bytesched.plugins.planned.sending import Streams, refuse_capture


@pytest.fixture(autouse=True)
def cuda() -> Iterator[FakeCuda]:
    with fake_cuda() as device:
        yield device


def chunks_of(count: int) -> Sequence[Chunk]:
    parameter, buffer = nn.Parameter(torch.zeros(count)), torch.zeros(count)
    bucket = Bucket(
        *(object(), buffer, [parameter], [buffer], {}),  # type: ignore[arg-type]
        holds_gradients=False,
        cut=lambda _, __, buffer: [Cut(end) for end in range(1, buffer.numel() + 1)],
        first=0,
    )
    return bucket.chunks


def test_a_chunk_that_was_held_back_is_issued_after_it_is_ready() -> None:
    streams, (one, two, three) = Streams(), chunks_of(3)
    first, second = FakeStream(), FakeStream()
    with CUDA.on(first):
        filled = first.queue()
        streams.hand_over([one, two], [])
        later = first.queue()
    with CUDA.on(second):
        streams.hand_over([three], [three, one])
        issued = second.queue()
    assert after(issued, filled)
    # And after nothing that has come since.
    assert not after(issued, later)
    assert (one.ready, three.ready) == (None, None)
    assert two.ready is not None


def test_where_it_became_ready_nothing_is_waited_for() -> None:
    streams, (one, two) = Streams(), chunks_of(2)
    first, other = FakeStream(), FakeStream()
    with CUDA.on(first):
        streams.hand_over([one], [])
        before = first.clock.copy()
        streams.hand_over([two], [one, two])
    assert first.clock == before
    assert not other.clock


def test_a_stream_that_was_seen_comes_after_what_was_done_elsewhere() -> None:
    streams, seen, unseen = Streams(), FakeStream(), FakeStream()
    with CUDA.on(seen):
        streams.see()
    with CUDA.on(FakeStream()):
        updated = CUDA.current().queue()
        streams.part()
    assert after(seen.queue(), updated)
    assert not after(unseen.queue(), updated)


def test_what_is_done_alone_comes_after_all_streams_that_were_seen() -> None:
    streams, seen, unseen = Streams(), FakeStream(), FakeStream()
    with CUDA.on(seen):
        streams.see()
        before = seen.queue()
    unseen.queue()
    with CUDA.on(FakeStream()):
        streams.join()
        done = CUDA.current().queue()
    assert after(done, before)
    assert not after(done, unseen.clock)


def test_a_stream_is_known_once() -> None:
    streams = Streams()
    assert streams.see() is streams.see() is CUDA.default


def test_a_graph_that_is_captured_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    refuse_capture()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(PluginError, match="a CUDA graph is being captured"):
        refuse_capture()
