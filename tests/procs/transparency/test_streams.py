"""The order of what a session queues on streams, over a device whose work ends late."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from fake_cuda import FakeCuda, FakeEvent, FakeStream, after, fake_cuda
from ranks import Ranks
from streams_scripts import (
    Event,
    broken_device,
    late_and_immediate_weights,
    over_a_fake_gpu,
    recorded,
    recorded_with_tensor_lr,
)
from torch import nn
from torch.utils._foreach_utils import _has_foreach_support

from bytesched.errors import PluginError
from bytesched.plugins.proxies.pending import LazyGrad
from bytesched.plugins.session.streams import CudaStreams, Streams, streams_for
from bytesched.task import CommTask

pytestmark = pytest.mark.procs

Recorded = tuple[list[Event], dict[str, list[int]], int]

#: event -> the state in which a chunk must be for it, and the one that it leads to
CHUNK = {
    "backward_done": ("complete", "queued"),
    "computed": ("queued", "computed"),
    "communication": ("computed", "sending"),
    "complete": ("sending", "complete"),
}


@pytest.fixture(scope="module")
def runs(two_ranks: Ranks) -> list[Recorded]:
    return two_ranks.run(recorded)


def replay(log: list[Event], chunks: dict[str, list[int]]) -> int:
    """Checks every event against the ones before it; returns how many updates there were."""
    state: dict[int, str] = {}
    stepped: set[int] = set()
    unread: set[str] = set()
    updates = 0
    for place, (what, whom) in enumerate(log):
        where = f"{what} {whom} at {place}"
        if what in CHUNK:
            needed, following = CHUNK[what]
            assert state.get(whom, "complete") == needed, f"{where}, which is {state.get(whom)}"
            state[whom] = following
        if what == "backward_done":
            stepped.discard(whom)
            stale = [name for name in unread if whom in chunks[name]]
            assert not stale, f"{where}: no stream waited for the update of {stale}"
        elif what == "stepped":
            stepped |= state.keys()
        elif what == "updated":
            assert whom, f"{where}: nothing was updated"
            updates += len(whom)
            unread |= set(whom)
            for name in whom:
                for chunk in chunks[name]:
                    assert state[chunk] == "complete", f"{where}: chunk {chunk} is {state[chunk]}"
                    assert chunk in stepped, f"{where}: step() was not called"
        elif what == "read":
            unread.clear()
    return updates


def test_order_of_every_chunk_and_update(runs: list[Recorded]) -> None:
    """Queued, computed, sent, complete; stepped; updated; read; and only then queued again."""
    for log, chunks, crossed in runs:
        assert crossed > 2
        assert replay(log, chunks) > 2 * len(chunks)


def test_every_round_notes_every_gradient_and_begins_with_the_forward(
    runs: list[Recorded],
) -> None:
    for log, chunks, _ in runs:
        kinds = [what for what, _ in log]
        rounds = kinds.count("begin")
        assert kinds.count("gradient") == rounds * len(chunks)
        assert kinds.index("begin") < kinds.index("gradient")
        assert kinds.count("lend") == kinds.count("stepped")


def test_all_ranks_send_in_one_order(runs: list[Recorded]) -> None:
    first, second = ([whom for what, whom in log if what == "communication"] for log, _, _ in runs)
    assert first == second


def test_nothing_happens_after_the_streams_are_closed(runs: list[Recorded]) -> None:
    for log, _, _ in runs:
        assert log[-1] == ("close", None)


def test_tensors_among_hyperparameters_are_lent_to_the_update(two_ranks: Ranks) -> None:
    for log in two_ranks.run(recorded_with_tensor_lr):
        lent = [count for what, count in log if what == "lend"]
        assert lent
        assert set(lent) == {1}


def test_late_streams_change_no_bit(two_ranks: Ranks) -> None:
    for late, immediate in two_ranks.run(late_and_immediate_weights):
        assert all(map(torch.equal, late, immediate))


def test_an_error_of_the_device_reaches_the_user(two_ranks: Ranks) -> None:
    for error, left in two_ranks.run(broken_device):
        assert "the device has failed" in error
        assert not left


def test_world_of_one(one_rank: Ranks) -> None:
    """The way in for NCCL, which takes no two ranks on one device."""
    ((log, chunks, crossed),) = one_rank.run(recorded)
    assert crossed > 2
    assert replay(log, chunks) > 2 * len(chunks)


def test_the_cpu_needs_no_streams() -> None:
    assert type(streams_for(torch.device("cpu"), lambda error: None)) is Streams


def test_gradients_take_the_fast_paths_of_plain_ones() -> None:
    """Torch looks at types before it looks at values, and the paths round differently on a GPU."""
    waits: list[int] = []
    grad = torch.randn(3).as_subclass(LazyGrad)
    grad.synchronize = lambda: waits.append(1)
    grad.is_taken = lambda: False
    assert _has_foreach_support([grad], torch.device("cuda"))
    assert not waits
    parameter = nn.Parameter(torch.randn(3))
    parameter.grad = grad
    nn.utils.clip_grad_norm_([parameter], 0.1)
    assert waits
    assert type(copy.deepcopy(grad)) is torch.Tensor
    torch.save(grad, io.BytesIO())
    assert not isinstance(torch.zeros(1), LazyGrad)


# -- the streams of a GPU, over a device that knows what comes after what ------------------------


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with fake_cuda() as device:
        yield device


@pytest.fixture
def errors() -> list[BaseException]:
    return []


@pytest.fixture
def streams(cuda: FakeCuda, errors: list[BaseException]) -> Iterator[CudaStreams]:
    made = CudaStreams(torch.device("cuda", 0), errors.append)
    yield made
    made.close()
    assert not errors


def task(index: int = 0) -> CommTask:
    made = CommTask(f"chunk {index}", start_at=0, stop_at=8)
    made.index = index
    return made


def wait_computed(streams: CudaStreams, chunk: CommTask) -> None:
    computed = threading.Event()
    streams.backward_done(chunk, lambda _: computed.set())
    assert computed.wait(5.0)


def test_chunk_is_sent_after_its_gradients_of_every_stream(
    cuda: FakeCuda, streams: CudaStreams
) -> None:
    side = FakeStream()
    with cuda.on(side):
        one = side.queue()
        streams.gradient()
    other = cuda.default.queue()
    streams.gradient()
    wait_computed(streams, task())
    with streams.communication(task()):
        sent = cuda.current().queue()
    assert after(sent, one)
    assert after(sent, other)


def test_completion_does_not_queue_behind_what_is_sent_next(
    cuda: FakeCuda, streams: CudaStreams
) -> None:
    with streams.communication(task(1)):
        sent_next = cuda.current().queue()
    with streams.completion(task(0)):
        received = cuda.current().queue()
    assert not after(received, sent_next)
    assert after(cuda.host, received)


def test_update_comes_after_what_was_queued_before_step(
    cuda: FakeCuda, streams: CudaStreams
) -> None:
    backward = cuda.default.queue()
    streams.stepped()
    with streams.update():
        updated = cuda.current().queue()
    assert after(updated, backward)
    assert not after(cuda.default.queue(), updated), "the user's stream waits too early"


def test_reads_on_every_known_stream_come_after_the_update(
    cuda: FakeCuda, streams: CudaStreams
) -> None:
    side, reader = FakeStream(), FakeStream()
    with cuda.on(side):
        streams.gradient()
    streams.stepped()
    with streams.update():
        updated = cuda.current().queue()
    with cuda.on(reader):
        streams.read()
    for stream in (cuda.default, side, reader):
        assert after(stream.queue(), updated)
    assert not after(cuda.host, updated), "the host has waited"


def test_capture_is_refused(cuda: FakeCuda, streams: CudaStreams) -> None:
    streams.begin()
    cuda.capturing = True
    with pytest.raises(PluginError, match="CUDA graph"):
        streams.begin()


def test_device_error_is_told_once(cuda: FakeCuda, errors: list[BaseException]) -> None:
    streams = CudaStreams(torch.device("cuda", 0), errors.append)
    broken = RuntimeError("device-side assert")
    with mock.patch.object(FakeEvent, "synchronize", side_effect=broken):
        for index in range(3):
            streams.backward_done(task(index), lambda _: None)
        streams.close()
        streams.close()
    assert errors == [broken]


def test_training_over_a_fake_gpu_keeps_the_order(two_ranks: Ranks) -> None:
    """Gradient made, chunk sent; used, updated; updated, used again."""
    for wrong, checks, all_updated in two_ranks.run(over_a_fake_gpu):
        assert not wrong
        assert checks > 50
        assert all_updated
