"""When a model computes each gradient and first needs each parameter, as measured.

From these times follow T* of a real model and its compute profile.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bytesched.bench.profile import LayerProfile, Profile
from bytesched.link.bound import Gradient

from .emulated import EmulatedModel
from .models import Workload

TRAFFIC_PIECE_BYTES = 1 << 20
TRAFFIC_DEPTH = 2


@dataclass(frozen=True)
class ComputeTimes:
    """Medians over several iterations; one entry per parameter, in the order of the model."""

    forward_s: float
    backward_s: float
    #: From the start of backward to the gradient.
    release_s: list[float]
    #: From the start of forward to the first call of the module that uses the parameter.
    first_use_s: list[float]
    nbytes: list[int]

    @property
    def compute_s(self) -> float:
        """Seconds of a forward and a backward pass."""
        return self.forward_s + self.backward_s

    def work(self) -> list[Gradient]:
        """The gradients as `bytesched.link.bound` wants them."""
        return [
            Gradient(release_s, max(0.0, self.forward_s - first_use_s), nbytes)
            for release_s, first_use_s, nbytes in zip(
                self.release_s, self.first_use_s, self.nbytes, strict=True
            )
        ]


class Traffic:
    """Sends as many bytes as the model's gradients have, once per iteration, meaning nothing.

    The all-reduces run beside the computation and nothing waits for them but the next round of
    traffic, so what the computation loses to them is what sharing the cores costs.
    """

    def __init__(self, nbytes: int) -> None:
        self._group = dist.new_group()
        self._pieces = max(1, round(nbytes / TRAFFIC_PIECE_BYTES))
        self._buffers = [torch.zeros(TRAFFIC_PIECE_BYTES // 4) for _ in range(TRAFFIC_DEPTH)]
        self._works: deque[dist.Work] = deque()

    def start(self) -> None:
        """Queue the bytes of one iteration; they cross the link one piece after another."""
        for piece in range(self._pieces):
            buffer = self._buffers[piece % TRAFFIC_DEPTH]
            self._works.append(dist.all_reduce(buffer, group=self._group, async_op=True))

    def finish(self) -> None:
        """Wait until nothing is on the link."""
        while self._works:
            self._works.popleft().wait()

    def close(self) -> None:
        """Release the process group."""
        self.finish()
        dist.destroy_process_group(self._group)


def measure_compute(
    workload: Workload, iterations: int, seed_of: Callable[[int], int], traffic: Traffic | None
) -> ComputeTimes:
    """Times of forward and backward of the plain model, beside `traffic` if there is any.

    The gradients are not averaged and the weights never updated: the values mean nothing.
    """
    model = workload.model
    parameters = dict(model.named_parameters())
    used_at: dict[str, float] = {}
    ready_at: dict[str, float] = {}
    handles = [model.register_forward_pre_hook(_stamp("", used_at))]
    for name, module in model.named_modules():
        if name:
            handles.append(module.register_forward_pre_hook(_stamp(name, used_at)))
    for name, parameter in parameters.items():
        handles.append(parameter.register_post_accumulate_grad_hook(_stamp(name, ready_at)))
    samples = []
    try:
        for step in range(iterations + 1):
            used_at.clear()
            ready_at.clear()
            model.zero_grad()
            start_s = time.perf_counter()
            loss = workload.loss(model, seed_of(step))
            turn_s = time.perf_counter()
            if traffic is not None:
                traffic.finish()
                traffic.start()
            backward_s = time.perf_counter()
            loss.backward()
            end_s = time.perf_counter()
            release_s = [ready_at.get(name, end_s) - backward_s for name in parameters]
            first_use_s = [_first_use(name, used_at, start_s) - start_s for name in parameters]
            samples.append((turn_s - start_s, end_s - backward_s, release_s, first_use_s))
    finally:
        for handle in handles:
            handle.remove()
        if traffic is not None:
            traffic.finish()
    forward, backward, release, first_use = zip(*samples[1:], strict=True)
    return ComputeTimes(
        forward_s=statistics.median(forward),
        backward_s=statistics.median(backward),
        release_s=[statistics.median(times) for times in zip(*release, strict=True)],
        first_use_s=[statistics.median(times) for times in zip(*first_use, strict=True)],
        nbytes=[p.numel() * p.element_size() for p in parameters.values()],
    )


def measure_update(model: nn.Module, optimizer: torch.optim.Optimizer, iterations: int) -> float:
    """Seconds of one whole optimizer step, every parameter having a gradient."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    times = []
    for _ in range(iterations + 1):
        start_s = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - start_s)
    return statistics.median(times[1:])


def record_profile(name: str, workload: Workload, times: ComputeTimes) -> Profile:
    """The measured model as a chain of layers, in the order of first use."""
    release_of = dict(zip(dict(workload.model.named_parameters()), times.release_s, strict=True))
    use_of = dict(zip(release_of, times.first_use_s, strict=True))
    owned: dict[str, list[str]] = {}
    for parameter in release_of:
        owned.setdefault(parameter.rpartition(".")[0], []).append(parameter)
    order = sorted(owned, key=lambda module: min(use_of[name] for name in owned[module]))
    starts = [min(use_of[name] for name in owned[module]) for module in order]
    ends = [*starts[1:], times.forward_s]
    starts[0] = 0.0
    released = [max(release_of[name] for name in owned[module]) for module in order]
    # The medians of two gradients that come together can be out of order.
    for index in range(len(released) - 2, -1, -1):
        released[index] = max(released[index], released[index + 1])
    before = [*released[1:], 0.0]
    released[0] = times.backward_s
    shapes = {name: tuple(p.shape) for name, p in workload.model.named_parameters()}
    batch, read_bytes = _read_bytes(workload)
    # What a layer hands on is what the next one reads; the last one's is small.
    output_bytes = [_read_by(module, read_bytes) for module in order[1:]] + [0]
    layers = tuple(
        LayerProfile(
            module or "model",
            1e3 * max(0.0, end - start),
            1e3 * max(0.0, release - earlier),
            tuple(shapes[name] for name in owned[module]),
            nbytes,
        )
        for module, start, end, release, earlier, nbytes in zip(
            order, starts, ends, released, before, output_bytes, strict=True
        )
    )
    return Profile(name, f"Recorded from {name}, one CPU core.", layers, batch)


def _read_bytes(workload: Workload) -> tuple[int, dict[str, int]]:
    """The batch size, and bytes of one sample that each module reads when it is first called.

    The batch size is the first dimension of what the model is called with; 0 if it is not called
    with a tensor, or has no batch.
    """
    if isinstance(workload.model, EmulatedModel):
        return 0, {}
    nbytes: dict[str, int] = {}
    batches: list[int] = []

    def note(name: str, args: tuple[object, ...]) -> None:
        tensors = [value for value in args if isinstance(value, Tensor)]
        if not name:
            batches.extend(tensor.shape[0] for tensor in tensors if tensor.dim())
        nbytes.setdefault(name, sum(tensor.nbytes for tensor in tensors))

    def hook(name: str) -> Callable[..., None]:
        return lambda _, args: note(name, args)

    handles = [
        module.register_forward_pre_hook(hook(name))
        for name, module in workload.model.named_modules()
    ]
    try:
        with torch.no_grad():
            workload.loss(workload.model, 0)
    finally:
        for handle in handles:
            handle.remove()
    if not batches:
        return 0, {}
    return batches[0], {name: total // batches[0] for name, total in nbytes.items()}


def _read_by(module: str, nbytes: dict[str, int]) -> int:
    """What a module reads, or the nearest one around it that is called at all."""
    while module and module not in nbytes:
        module = module.rpartition(".")[0]
    return nbytes.get(module, 0)


def _stamp(name: str, stamps: dict[str, float]) -> Callable[..., None]:
    def hook(*_: Tensor) -> None:
        stamps.setdefault(name, time.perf_counter())

    return hook


def _first_use(parameter: str, used_at: dict[str, float], start_s: float) -> float:
    """First call of the owner, or of the nearest module around it that is called at all."""
    owner = parameter.rpartition(".")[0]
    while owner and owner not in used_at:
        owner = owner.rpartition(".")[0]
    return used_at.get(owner, start_s)
