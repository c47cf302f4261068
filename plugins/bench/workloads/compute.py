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

    @property
    def compute_s(self) -> float:
        """Seconds of a forward and a backward pass."""
        return self.forward_s + self.backward_s

    def work(self) -> list[Gradient]:
        """The gradients as `bytesched.link.bound` wants them."""
        each = zip(self.release_s, self.first_use_s, self.nbytes, strict=True)
        return [Gradient(ready, max(0.0, self.forward_s - use), size) for ready, use, size in each]


class Traffic:
    """Sends as many bytes as the model's gradients have, once per iteration, meaning nothing.

    The all-reduces run beside the computation and nothing waits for them but the next round of
    traffic, so what the computation loses to them is what sharing the cores costs.
    """

    def __init__(self, nbytes: int) -> None:
        self._group = dist.new_group()
        self._pieces = max(1, round(nbytes / TRAFFIC_PIECE_BYTES))
        self._buffers = [torch.zeros(TRAFFIC_PIECE_BYTES // 4) for _ in range(TRAFFIC_DEPTH)]
        self._works: list[Any] = []

    def start(self) -> None:
        """Queue the bytes of one iteration when nothing is on the link."""
        self.finish()
        for piece in range(self._pieces):
            buffer = self._buffers[piece % TRAFFIC_DEPTH]
            self._works.append(dist.all_reduce(buffer, group=self._group, async_op=True))

    def finish(self) -> None:
        """Wait until nothing is on the link."""
        while self._works:
            self._works.pop(0).wait()

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

    def stamp(moments: dict[str, float], name: str, *_: Any) -> None:
        moments.setdefault(name, time.perf_counter())

    samples = []
    with ExitStack() as hooks:
        _watch_calls(hooks, model, partial(stamp, used_at))
        for name, parameter in parameters.items():
            handle = parameter.register_post_accumulate_grad_hook(partial(stamp, ready_at, name))
            hooks.callback(handle.remove)
        for step in range(iterations + 1):
            used_at.clear()
            ready_at.clear()
            model.zero_grad()
            start_s = time.perf_counter()
            loss = workload.loss(model, seed_of(step))
            turn_s = time.perf_counter()
            if traffic is not None:
                traffic.start()
            backward_s = time.perf_counter()
            loss.backward()
            end_s = time.perf_counter()
            release_s = [ready_at.get(name, end_s) - backward_s for name in parameters]
            owners = (name.rpartition(".")[0] for name in parameters)
            first_use_s = [_nearest(owner, used_at, start_s) - start_s for owner in owners]
            samples.append((turn_s - start_s, end_s - backward_s, release_s, first_use_s))
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
    batch, read_bytes = _read_bytes(workload)
    # What a layer hands on is what the next one reads; the last one's is small.
    output_bytes = [_nearest(module, read_bytes, 0) for module in order[1:]] + [0]
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

    with ExitStack() as hooks, torch.no_grad():
        _watch_calls(hooks, workload.model, note)
        workload.loss(workload.model, 0)
    if not batches:
        return 0, {}
    return batches[0], {name: total // batches[0] for name, total in nbytes.items()}


def _watch_calls(
    hooks: ExitStack, model: nn.Module, note: Callable[[str, tuple[object, ...]], None]
) -> None:
    """Has `note` called with the name and the arguments of each module that is called."""
    for name, module in model.named_modules():
        hook = module.register_forward_pre_hook(lambda _, args, name=name: note(name, args))
        hooks.callback(hook.remove)


def _nearest(module: str, found: Mapping[str, NumberT], default: NumberT) -> NumberT:
    """What was found of a module, or of the nearest one around it that is called at all."""
    while module and module not in found:
        module = module.rpartition(".")[0]
    return found.get(module, default)
