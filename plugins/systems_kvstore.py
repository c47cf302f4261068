"""The systems of the bench that send through servers, each set up on a plain model.

All of them use the same store, and so the same transport and the same service at the servers.
What differs is when what is sent.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Mapping
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import nn

from bytesched.errors import ConfigError, SchedulerTimeout
from bytesched.kvstore import Ended, Key
from bytesched.plugins.systems import Running, make_optimizer, scheduled

__all__ = ["StopAndWait", "WholeKeys", "set_up_store"]

#: MXNet splits larger arrays evenly over all servers (MXNET_KVSTORE_BIGARRAY_BOUND).
_LARGE_ELEMENTS = 1_000_000
#: P3's slices (MXNET_KVSTORE_SLICE_THRESHOLD); its paper has 50,000.
_SLICE_ELEMENTS = 40_000
_ELEMENT_BYTES = 4
#: All slices that are ready go on to the store, which lets them out one by one.
_NO_LIMIT = 1 << 40


def set_up_store(
    kind: str,
    options: Mapping[str, str],
    model: nn.Module,
    optimizer_name: str,
    store: Any,
    *,
    servers: int,
    timeout_s: float,
) -> Running:
    """The system ``kind`` around ``model``; options are texts as the command line has them.

    kv-plain takes none, kv-p3 ``slice`` (elements) and ``window`` (slices on the way), and
    bytesched-kv the fields of its configuration.
    """
    optimizer = make_optimizer(optimizer_name, model)
    if kind == "kv-plain":
        _refuse_all_but((), options, kind)
        WholeKeys(model, optimizer, store, servers=servers, timeout_s=timeout_s)
        return Running(model, optimizer)
    if kind == "kv-p3":
        _refuse_all_but(("slice", "window"), options, kind)
        elements = int(options.get("slice", _SLICE_ELEMENTS))
        fields = {
            "partition_bytes": str(_ELEMENT_BYTES * elements),
            "credit_bytes": str(_NO_LIMIT),
        }
        store = StopAndWait(store, window=int(options.get("window", 1)))
        return scheduled(optimizer, model, fields, kvstore=store)
    return scheduled(optimizer, model, options, kvstore=store)


def _refuse_all_but(known: tuple[str, ...], options: Mapping[str, str], kind: str) -> None:
    if strange := [name for name in options if name not in known]:
        raise ConfigError(f"{kind} has no option {strange[0]!r}: {', '.join(known) or 'none'}")


class WholeKeys:
    """What a framework does by itself: push and pull a gradient when backward has computed it.

    Gradients are keys as they are; only very large ones are split over the servers. All transfers
    are begun at once, so they run beside backward in its order, and ``step()`` waits for all.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        store: Any,
        *,
        servers: int,
        timeout_s: float,
    ) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._outstanding = 0
        self._ends: SimpleQueue[BaseException | None] = SimpleQueue()
        for name, parameter in model.named_parameters():
            parts = max(servers, 1) if parameter.numel() > _LARGE_ELEMENTS else 1
            keys = [f"{name}/{part}" for part in range(parts)]
            for key, part in zip(keys, _split(parameter.detach(), parts), strict=True):
                store.init(key, part)
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


def _split(tensor: torch.Tensor, parts: int) -> tuple[torch.Tensor, ...]:
    return tensor.view(-1).tensor_split(parts)


class StopAndWait:
    """A store whose pushes leave one at a time, the most urgent first, as from P3's sender.

    The next one leaves when the server has the last (P3, SysML'19, by way of the talk on
    ByteScheduler); pulls are not held back. Everything else is the store's own.

    Args:
        window: how many may be on the way.
    """

    def __init__(self, store: Any, *, window: int = 1) -> None:
        self._store = store
        self._free = window
        self._lock = threading.Lock()
        self._pushes = 0
        self._waiting: list[tuple[int, int, Callable[[Ended], None], Ended]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def start_push(self, key: Key, value: Any, ended: Ended, priority: int = 0) -> None:
        """Begins a push when its turn has come."""

        def begin(then: Ended) -> None:
            self._store.start_push(key, value, then, priority)

        with self._lock:
            self._pushes += 1
            heapq.heappush(self._waiting, (-priority, self._pushes, begin, ended))
        self._begin_next()

    def _begin_next(self) -> None:
        with self._lock:
            if not self._waiting or not self._free:
                return
            self._free -= 1
            _, _, begin, ended = heapq.heappop(self._waiting)
        begin(partial(self._ended, ended))

    def _ended(self, ended: Ended, error: BaseException | None) -> None:
        with self._lock:
            self._free += 1
        self._begin_next()
        ended(error)
