"""The link between ranks, measured by sums of several sizes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from time import perf_counter, process_time
from typing import Any, Final, TypeAlias

import torch

from bytesched.link.sizes import PROBE_WINDOW, Probe, probe_sizes

#: the key of what ranks sum to begin a measurement together
BEFORE_PROBES: Final = "before a probe"

_TASK: Final = "a probe of the link"

#: all-reduces per measurement, and measurements per size: the best one counts
_COUNT: Final = 6
_TRIES: Final = 2
#: the same for measurements shorter than that: a moment in which a core was away costs them most,
#: and would make chunks several times too large
_SHORT_TRIES: Final = 5
_SHORT_S: Final = 0.05

#: begins to sum a tensor that has a key, and returns the work
_Start: TypeAlias = Callable[[torch.Tensor, str], Any]
#: returns when the work of a task is over, or raises
_Wait: TypeAlias = Callable[[Any, str], None]
#: what rank 0 passed, on all ranks; collective, with as many whole numbers on all of them
FromLeader: TypeAlias = Callable[[Sequence[int]], list[int]]


def probes(
    start: _Start, wait: _Wait, from_leader: FromLeader, device: torch.device, model_bytes: int
) -> list[Probe]:
    """Of growing sizes, the same on all ranks; collective, while nothing else is under way.

    Args:
        device: where gradients are.
        model_bytes: of all gradients.
    """
    #: what the last one has shown, the same on all ranks
    rate = inf

    def probe(nbytes: int) -> Probe:
        nonlocal rate
        tries = _SHORT_TRIES if _COUNT * nbytes < _SHORT_S * rate else _TRIES
        once = partial(timed, start, wait, device, nbytes, _COUNT, PROBE_WINDOW)
        best_s, least_cpu_s = map(min, zip(*(once() for _ in range(tries)), strict=True))
        found = [int(_COUNT * nbytes / best_s), int(1e9 * least_cpu_s / _COUNT)]
        bytes_per_s, cpu_ns = from_leader(found)
        rate = float(bytes_per_s)
        return Probe(nbytes, rate, cpu_ns / 1e9)

    return probe_sizes(probe, model_bytes)


def timed(
    start: _Start, wait: _Wait, device: torch.device, nbytes: int, count: int, window: int
) -> tuple[float, float]:
    """Seconds of ``count`` sums, ``window`` of them at a time; and of CPU time of this process."""
    buffers = [torch.zeros(nbytes // 4, device=device) for _ in range(window)]
    wait(start(buffers[0][:1], BEFORE_PROBES), _TASK)
    _synchronize(device)
    began_s, began_cpu_s = perf_counter(), process_time()
    works: deque[Any] = deque()
    for index in range(count):
        if len(works) == window:
            wait(works.popleft(), _TASK)
        works.append(start(buffers[index % window], f"probe {nbytes}.{index % window}"))
    for work in works:
        wait(work, _TASK)
    _synchronize(device)
    return perf_counter() - began_s, process_time() - began_cpu_s


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
