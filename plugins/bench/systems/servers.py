"""The systems of the bench that send through servers, each set up on a plain model.

All of them use the same store, and so the same transport and the same service at the servers.
What differs is when what is sent.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import nn

from bytesched.bench.specification import Specification
from bytesched.errors import SchedulerTimeout

from .data_parallel import Running, make_optimizer, scheduled

#: MXNet splits larger arrays evenly over all servers (MXNET_KVSTORE_BIGARRAY_BOUND).
_LARGE_ELEMENTS = 1_000_000
#: P3's slices (MXNET_KVSTORE_SLICE_THRESHOLD); its paper has 50,000.
_SLICE_ELEMENTS = 40_000


def set_up_store(
    kind: str, options: Mapping[str, str], model: nn.Module, spec: Specification, store: Any
) -> Running:
    """The system ``kind`` around ``model``; options are texts as the command line has them.

    kv-plain takes none, kv-p3 ``slice`` (elements) and ``window`` (slices on the way), and
    bytesched-kv the fields of its configuration.
    """
    if kind == "kv-p3":
        sizes = int(options.get("slice", _SLICE_ELEMENTS)), int(options.get("window", 1))
        p3 = P3(model, spec, store, *sizes)
        return Running(model, p3, p3.close)
    optimizer = make_optimizer(model.parameters(), fused=False)
    if kind == "kv-plain":
        WholeKeys(model, optimizer, spec, store)
        return Running(model, optimizer)
    return scheduled(optimizer, model, options, store)


class WholeKeys:
    """What a framework does by itself: push and pull a gradient when backward has computed it.

    Gradients are keys as they are; only very large ones are split over the servers. All transfers
    are begun at once, so they run beside backward in its order, and ``step()`` waits for all.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, spec: Specification, store: Any
    ) -> None:
        self._store = store
        self._timeout_s = spec.timeout_s
        self._outstanding = 0
        self._ends: SimpleQueue[BaseException | None] = SimpleQueue()
        for name, parameter in model.named_parameters():
            parts = max(spec.servers or 0, 1) if parameter.numel() > _LARGE_ELEMENTS else 1
            keys = _put(store, name, parameter, parts)
            parameter.register_post_accumulate_grad_hook(partial(self._exchange, keys))
        optimizer.register_step_pre_hook(self._wait)

    def _exchange(self, keys: list[str], parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        grad = parameter.grad.div_(self._store.num_workers)
        for key, part in zip(keys, _split(grad, len(keys)), strict=True):
            self._outstanding += 1
            self._store.start_push(key, part, partial(self._pushed, key, part))

    def _pushed(self, key: str, part: torch.Tensor, error: BaseException | None) -> None:
        if error is None:
            self._store.start_pull(key, part, self._ends.put)
        else:
            self._ends.put(error)

    def _wait(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for _ in range(self._outstanding):
            try:
                error = self._ends.get(timeout=self._timeout_s)
            except Empty:
                raise SchedulerTimeout(f"waited {self._timeout_s:g} s for the store") from None
            if error is not None:
                raise error
        self._outstanding = 0


def _put(store: Any, name: str, parameter: torch.Tensor, parts: int) -> list[str]:
    """The keys of a parameter, of which each stands for a part of it in the store."""
    keys = [f"{name}/{part}" for part in range(parts)]
    for key, part in zip(keys, _split(parameter.detach(), parts), strict=True):
        store.init(key, part)
    return keys


def _split(tensor: torch.Tensor, parts: int) -> tuple[torch.Tensor, ...]:
    return tensor.view(-1).tensor_split(parts)


class P3:
    """Priority-based parameter propagation (Jayarajan et al., SysML'19).

    Every tensor is cut into slices, which are keys. Slices leave one at a time, first layer first:
    the next one when the server has the last, as the authors of ByteScheduler describe it. Pulls
    are not held back. A parameter is updated when its last slice is here, beside the forward pass
    of those before it; nothing waits for the whole model.

    It stands for the optimizer in the training loop.

    Args:
        slice_elements: most elements of a slice.
        window: slices that may be on their way to the servers.
    """

    def __init__(
        self, model: nn.Module, spec: Specification, store: Any, slice_elements: int, window: int
    ) -> None:
        self._store = store
        self._timeout_s = spec.timeout_s
        self._lock = threading.Lock()
        self._free = window
        self._pushes: list[tuple[int, int, str, torch.Tensor]] = []
        self._tensors: list[_P3Tensor] = []
        self._stepped = threading.Event()
        self._complete: SimpleQueue[_P3Tensor | None] = SimpleQueue()
        self._error: BaseException | None = None
        of: dict[int, _P3Tensor] = {}
        for name, parameter in model.named_parameters():
            keys = _put(store, name, parameter, -(-parameter.numel() // slice_elements))
            optimizer = make_optimizer([parameter], fused=False)
            tensor = _P3Tensor(len(self._tensors), parameter, optimizer, keys)
            tensor.updated.set()
            self._tensors.append(tensor)
            of[id(parameter)] = tensor
            parameter.register_post_accumulate_grad_hook(partial(self._on_grad, tensor))
        for module in model.modules():
            if own := [of[id(p)] for p in module.parameters(recurse=False)]:
                module.register_forward_pre_hook(partial(self._wait, own))
        self._thread = threading.Thread(target=self._update, daemon=True)
        self._thread.start()

    def zero_grad(self) -> None:
        """Gradients are under way, and were taken off their parameters."""

    def step(self) -> None:
        """From now on, what is complete is updated."""
        self._stepped.set()

    def close(self) -> None:
        """Every update is applied."""
        self._wait(self._tensors)
        self._complete.put(None)
        self._thread.join(self._timeout_s)

    def _on_grad(self, tensor: _P3Tensor, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self._stepped.clear()
        grad, parameter.grad = parameter.grad.div_(self._store.num_workers), None
        tensor.grad, tensor.missing = grad, len(tensor.keys)
        tensor.updated.clear()
        with self._lock:
            slices = zip(tensor.keys, _split(grad, len(tensor.keys)), strict=True)
            for number, (key, part) in enumerate(slices):
                heapq.heappush(self._pushes, (tensor.number, number, key, part))
        self._push_next()

    def _push_next(self) -> None:
        with self._lock:
            if not self._pushes or not self._free:
                return
            self._free -= 1
            number, _, key, part = heapq.heappop(self._pushes)
        tensor = self._tensors[number]
        pushed = partial(self._pushed, tensor, key, part)
        self._store.start_push(key, part, self._unless_failed(pushed), -number)

    def _pushed(self, tensor: _P3Tensor, key: str, part: torch.Tensor) -> None:
        with self._lock:
            self._free += 1
        pulled = partial(self._pulled, tensor)
        self._store.start_pull(key, part, self._unless_failed(pulled), -tensor.number)
        self._push_next()

    def _pulled(self, tensor: _P3Tensor) -> None:
        tensor.missing -= 1
        if not tensor.missing:
            self._complete.put(tensor)

    def _unless_failed(self, then: Callable[[], None]) -> Callable[[BaseException | None], None]:
        return lambda error: then() if error is None else self._fail(error)

    def _update(self) -> None:
        while (tensor := self._complete.get()) is not None:
            # Backward may still read a parameter whose gradient is there.
            self._stepped.wait()
            tensor.parameter.grad, tensor.grad = tensor.grad, None
            tensor.optimizer.step()
            tensor.parameter.grad = None
            tensor.updated.set()

    def _wait(self, tensors: list[_P3Tensor], *_: Any) -> None:
        for tensor in tensors:
            if not tensor.updated.wait(self._timeout_s):
                self._fail(SchedulerTimeout(f"waited {self._timeout_s:g} s for the store"))
        if self._error is not None:
            raise self._error

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        for tensor in self._tensors:
            tensor.updated.set()


@dataclass(eq=False)
class _P3Tensor:
    """A parameter, and how far its gradient is."""

    number: int
    parameter: nn.Parameter
    optimizer: torch.optim.Optimizer
    keys: list[str]
    grad: torch.Tensor | None = None
    #: slices that are not back
    missing: int = 0
    updated: threading.Event = field(default_factory=threading.Event)
