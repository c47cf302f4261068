"""When a model computes each gradient and first needs each parameter, as measured.

From these times follow T* of a real model and its compute profile.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bytesched.bench.profile import LayerProfile, Profile
from bytesched.link.bound import Gradient

from .emulated import EmulatedModel
from .models import Workload

NumberT = TypeVar("NumberT", int, float)

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
    #: the first dimension of what the model is called with; 0 if it is not called with a tensor
    batch: int
    #: what each module reads when it is first called
    read_bytes: dict[str, int]

    @property
    def compute_s(self) -> float:
        """Seconds of a forward and a backward pass."""
        return self.forward_s + self.backward_s

    def work(self) -> list[Gradient]:
        """The gradients as `bytesched.link.bound` wants them."""
        each = zip(self.release_s, self.first_use_s, self.nbytes, strict=True)
        return [Gradient(ready, max(0.0, self.forward_s - use), size) for ready, use, size in each]


def measure_compute(
    workload: Workload, iterations: int, seed_of: Callable[[int], int], traffic_bytes: int = 0
) -> ComputeTimes:
    """Times of forward and backward of the plain model, beside all-reduces of so many bytes.

    These run beside each backward pass and nothing waits for them but the next ones, so what the
    computation loses to them is what sharing the cores costs. The gradients are not averaged and
    the weights never updated: the values mean nothing.
    """
    model = workload.model
    parameters = dict(model.named_parameters())
    used_at: dict[str, float] = {}
    ready_at: dict[str, float] = {}
    read_bytes: dict[str, int] = {}
    batches: list[int] = []

    def called(name: str, args: tuple[object, ...]) -> None:
        used_at.setdefault(name, time.perf_counter())
        if name not in read_bytes:
            tensors = [value for value in args if isinstance(value, Tensor)]
            read_bytes[name] = sum(tensor.nbytes for tensor in tensors)
            batches.extend(tensor.shape[0] for tensor in tensors if not name and tensor.dim())

    buffers = [torch.zeros(TRAFFIC_PIECE_BYTES // 4) for _ in range(TRAFFIC_DEPTH)]
    pieces = max(1, round(traffic_bytes / TRAFFIC_PIECE_BYTES)) if traffic_bytes else 0

    def released(name: str, _: Tensor) -> None:
        ready_at.setdefault(name, time.perf_counter())

    samples = []
    works: list[Any] = []
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hook = module.register_forward_pre_hook(lambda _, args, name=name: called(name, args))
            hooks.callback(hook.remove)
        for name, parameter in parameters.items():
            handle = parameter.register_post_accumulate_grad_hook(partial(released, name))
            hooks.callback(handle.remove)
        for step in range(iterations + 1):
            used_at.clear()
            ready_at.clear()
            model.zero_grad()
            start_s = time.perf_counter()
            loss = workload.loss(model, seed_of(step))
            turn_s = time.perf_counter()
            for work in works:
                work.wait()
            works = [
                dist.all_reduce(buffers[n % TRAFFIC_DEPTH], async_op=True) for n in range(pieces)
            ]
            backward_s = time.perf_counter()
            loss.backward()
            end_s = time.perf_counter()
            release_s = [ready_at.get(name, end_s) - backward_s for name in parameters]
            owners = (name.rpartition(".")[0] for name in parameters)
            first_use_s = [_nearest(owner, used_at, start_s) - start_s for owner in owners]
            samples.append((turn_s - start_s, end_s - backward_s, release_s, first_use_s))
    for work in works:
        work.wait()
    forward, backward, release, first_use = zip(*samples[1:], strict=True)
    return ComputeTimes(
        forward_s=statistics.median(forward),
        backward_s=statistics.median(backward),
        release_s=[statistics.median(times) for times in zip(*release, strict=True)],
        first_use_s=[statistics.median(times) for times in zip(*first_use, strict=True)],
        nbytes=[p.numel() * p.element_size() for p in parameters.values()],
        batch=batches[0] if batches and not isinstance(model, EmulatedModel) else 0,
        read_bytes=read_bytes,
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
    parameters = dict(workload.model.named_parameters())
    owned: dict[str, list[int]] = {}
    for index, parameter in enumerate(parameters):
        owned.setdefault(parameter.rpartition(".")[0], []).append(index)
    used_s = {module: min(times.first_use_s[n] for n in own) for module, own in owned.items()}
    order = sorted(owned, key=used_s.__getitem__)
    starts_s = [0.0, *(used_s[module] for module in order[1:]), times.forward_s]
    released_s = [max(times.release_s[n] for n in owned[module]) for module in order]
    # The medians of two gradients that come together can be out of order.
    released_s = list(accumulate(reversed(released_s), max))[::-1]
    ends_s = [times.backward_s, *released_s[1:], 0.0]
    shapes = [tuple(parameter.shape) for parameter in parameters.values()]
    # What a layer hands on of a sample is what the next one reads; the last one's is small.
    batch, read_bytes = times.batch, times.read_bytes if times.batch else {}
    output_bytes = [_nearest(module, read_bytes, 0) // (batch or 1) for module in order[1:]] + [0]
    layers = tuple(
        LayerProfile(
            module or "model",
            1e3 * max(0.0, starts_s[n + 1] - starts_s[n]),
            1e3 * max(0.0, ends_s[n] - ends_s[n + 1]),
            tuple(shapes[index] for index in owned[module]),
            output_bytes[n],
        )
        for n, module in enumerate(order)
    )
    return Profile(name, f"Recorded from {name}, one CPU core.", layers, batch)


def _nearest(module: str, found: Mapping[str, NumberT], default: NumberT) -> NumberT:
    """What was found of a module, or of the nearest one around it that is called at all."""
    while module and module not in found:
        module = module.rpartition(".")[0]
    return found.get(module, default)
