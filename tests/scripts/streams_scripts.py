"""Sessions over streams that only write down what they are told, run on the ranks of a test."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from fake_cuda import CUDA, Clock, after, fake_cuda
from torch import nn
from training import STEPS, adamw, mlp

from bytesched.config import Config
from bytesched.plugins.c10d import ddp
from bytesched.plugins.c10d.entry import Entry
from bytesched.plugins.engine.session import Session
from bytesched.plugins.routes.streams import CudaStreams, Streams
from bytesched.task import CommTask

#: What happened, and to whom: a chunk, the updated parameters, or nobody in particular.
Event = tuple[str, Any]
# A chunk is computed so much later than its backward is queued: step() finds it outstanding.
DELAY_S = 0.002


class RecordingStreams(Streams):
    """As late as a device would be: what was queued is computed after a while, on a thread."""

    are_several = True

    def __init__(self, device: torch.device, fail: Callable[[BaseException], None]) -> None:
        self.log: list[Event] = []
        self.session: Session | None = None
        self._fail = fail
        self._queued: SimpleQueue[tuple[CommTask, Callable[[CommTask], None]] | None] = (
            SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name="bytesched-late", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        self.log.append(("begin", None))

    def gradient(self) -> None:
        self.log.append(("gradient", None))

    def backward_done(self, task: CommTask, then: Callable[[CommTask], None]) -> None:
        self.log.append(("backward_done", task.index))
        self._queued.put((task, then))

    @contextlib.contextmanager
    def communication(self, task: CommTask) -> Iterator[None]:
        self.log.append(("communication", task.index))
        yield

    @contextlib.contextmanager
    def completion(self, task: CommTask) -> Iterator[None]:
        yield
        self.log.append(("complete", task.index))

    @contextlib.contextmanager
    def update(self) -> Iterator[None]:
        self.log.append(("updating", None))
        assert self.session is not None
        before = versions(self.session)
        yield
        changed = versions(self.session).items() - before.items()
        self.log.append(("updated", [name for name, _ in changed]))

    def read(self) -> None:
        self.log.append(("read", None))

    def stepped(self) -> None:
        self.log.append(("stepped", None))

    def lend(self, values: Any) -> None:
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        self.log.append(("lend", len(tensors)))

    def close(self) -> None:
        self.log.append(("close", None))
        self._queued.put(None)
        self._thread.join(5.0)

    def _run(self) -> None:
        while (queued := self._queued.get()) is not None:
            time.sleep(DELAY_S)
            task, then = queued
            self.log.append(("computed", task.index))
            then(task)


def versions(session: Session) -> dict[str, int]:
    """How often each parameter has been written, without a look that would wait."""
    assert session.plan is not None
    return {slot.name: slot.alias._version for slot in session.plan.slots}


class FailingStreams(RecordingStreams):
    """A device that breaks in the middle of a round."""

    def _run(self) -> None:
        for _ in range(20):
            if (queued := self._queued.get()) is not None:
                task, then = queued
                self.log.append(("computed", task.index))
                then(task)
        self._fail(RuntimeError("the device has failed"))


class PlacedStreams(CudaStreams):
    """The streams of a GPU over a fake one, with the place of every send and every update."""

    def __init__(self, device: torch.device, fail: Callable[[BaseException], None]) -> None:
        super().__init__(torch.device("cuda", 0), fail)
        self.session: Session | None = None
        #: parameter -> the place of its last update
        self.updated: dict[str, Clock] = {}
        #: parameter -> the last place where the model used it, and where its gradient was made
        self.used: dict[str, Clock] = {}
        self.made: dict[str, Clock] = {}
        #: the last place before step()
        self.before_step: Clock | None = None
        self.wrong: list[str] = []
        self.checks = 0

    @contextlib.contextmanager
    def communication(self, task: CommTask) -> Iterator[None]:
        assert self.session is not None
        assert self.session.plan is not None
        with super().communication(task):
            yield
            place = CUDA.current().queue()
        for piece in self.session.plan.slices[task.index]:
            self.expect(place, self.made.get(piece.slot.name), f"{task.name} sent too early")

    @contextlib.contextmanager
    def update(self) -> Iterator[None]:
        assert self.session is not None
        before = versions(self.session)
        with super().update():
            yield
            place = CUDA.current().queue()
        for name, _ in versions(self.session).items() - before.items():
            self.expect(place, self.used.get(name), f"{name} updated too early")
            self.expect(place, self.before_step, f"{name} updated before step()")
            self.updated[name] = place

    def use(self, name: str) -> None:
        self.used[name] = place = CUDA.current().queue()
        self.expect(place, self.updated.get(name), f"{name} used too early")

    def expect(self, place: Clock, other: Clock | None, wrong: str) -> None:
        self.checks += other is not None
        if other is not None and not after(place, other):
            self.wrong.append(wrong)


@contextlib.contextmanager
def attached(
    optimizer: torch.optim.Optimizer, model: nn.Module, **fields: Any
) -> Iterator[Session]:
    """`wrap` without its shortcuts: a world of one is scheduled, too."""
    config = Config.load(**fields)
    session = ddp.attach(optimizer, model, config, Entry(ddp.base_of(model)))
    session.add_optimizer(
        optimizer, type(optimizer), cross=not ddp.why_whole(optimizer, model, config)
    )
    try:
        yield session
        session.flush()
    finally:
        session.close()


@contextlib.contextmanager
def attached_over(
    streams: type[Streams], optimizer: torch.optim.Optimizer, model: nn.Module
) -> Iterator[tuple[Session, Any]]:
    """A session over `streams`, in small chunks, and those streams."""

    def made(device: torch.device, fail: Callable[[BaseException], None]) -> Streams:
        return streams() if streams is Streams else streams(device, fail)  # type: ignore[call-arg]

    with (
        mock.patch("bytesched.plugins.engine.hooked.streams_for", made),
        attached(optimizer, model, partition_bytes=256, credit_bytes=512) as session,
    ):
        if isinstance(session._streams, (RecordingStreams, PlacedStreams)):
            session._streams.session = session
        yield session, session._streams


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
        model(torch.randn(4, 8, generator=generator)).square().mean().backward()
        optimizer.step()


def model_and_optimizer(**arguments: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(7)
    model = mlp()
    return model, adamw(model, **arguments)


def recorded(**arguments: Any) -> tuple[list[Event], dict[str, list[int]], int]:
    """The log of one run, the chunks of each parameter, and how many steps crossed the barrier.

    `arguments` are the optimizer's.
    """
    model, optimizer = model_and_optimizer(**arguments)
    with attached_over(RecordingStreams, optimizer, model) as (session, streams):
        train(model, optimizer)
        session.flush()
        assert session.plan is not None
        chunks = {slot.name: [c.index for c in slot.chunks] for slot in session.plan.slots}
        crossed = int(session.stats()["barrier_crossed_steps"])
    return streams.log, chunks, crossed


def recorded_with_tensor_lr() -> list[Event]:
    return recorded(lr=torch.tensor(0.01))[0]


def weights_over(streams: type[Streams]) -> list[torch.Tensor]:
    model, optimizer = model_and_optimizer()
    with attached_over(streams, optimizer, model):
        train(model, optimizer)
    return [p.detach().clone() for p in model.parameters()]


def late_and_immediate_weights() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return weights_over(RecordingStreams), weights_over(Streams)


def over_a_fake_gpu() -> tuple[list[str], int, bool]:
    """What came too early, how often that was checked, and if all parameters were updated late."""
    with fake_cuda() as device:
        model, optimizer = model_and_optimizer()
        late: list[PlacedStreams] = []

        def note_step(*_: Any) -> None:
            late[0].before_step = device.current().queue()

        optimizer.register_step_pre_hook(note_step)
        with attached_over(PlacedStreams, optimizer, model) as (session, streams):
            late.append(streams)
            for prefix, module in model.named_modules():
                for name, parameter in module.named_parameters(prefix, recurse=False):
                    module.register_forward_hook(lambda *_, name=name: streams.use(name))
                    parameter.register_hook(
                        lambda _, name=name: streams.made.update({name: device.current().queue()})
                    )
            train(model, optimizer)
            session.flush()
            everything = streams.updated.keys() == dict(model.named_parameters()).keys()
    return streams.wrong, streams.checks, everything


def broken_device() -> tuple[str, list[str]]:
    """What training raises when the device fails, and our threads that are left then."""
    model, optimizer = model_and_optimizer()
    try:
        with attached_over(FailingStreams, optimizer, model):
            train(model, optimizer)
    except RuntimeError as error:
        left = [t.name for t in threading.enumerate() if t.name.startswith("bytesched")]
        return str(error), left
    return "", []
