"""The link between ranks, measured by sums of several sizes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from time import perf_counter, process_time
from typing import Any, Final

import torch

from bytesched.link.sizes import PROBE_WINDOW, Probe, probe_sizes

__all__ = ["BEFORE_PROBES", "FromLeader", "Probing"]

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

#: what rank 0 passed, on all ranks; collective, with as many whole numbers on all of them
FromLeader = Callable[[Sequence[int]], list[int]]


class Probing:
    """All-reduces over the ranks of one session, while nothing else is under way.

    Args:
        start: begins to sum a tensor that has a key, and returns the work.
        wait: returns when the work of a task is over, or raises.
        device: where gradients are.
    """

    def __init__(
        self,
        start: Callable[[torch.Tensor, str], Any],
        wait: Callable[[Any, str], None],
        from_leader: FromLeader,
        device: torch.device,
    ) -> None:
        self._start = start
        self._wait = wait
        self._from_leader = from_leader
        self._device = device
        #: what the last probe has shown, the same on all ranks
        self._bytes_per_s = inf

    def probes(self, model_bytes: int) -> list[Probe]:
        """Of growing sizes, the same on all ranks; collective.

        Args:
            model_bytes: of all gradients.
        """
        return probe_sizes(self._probe, model_bytes)

    def _probe(self, nbytes: int) -> Probe:
        is_short = _COUNT * nbytes < _SHORT_S * self._bytes_per_s
        tries = [self._timed(nbytes) for _ in range(_SHORT_TRIES if is_short else _TRIES)]
        best_s, least_cpu_s = (min(values) for values in zip(*tries, strict=True))
        found = [int(_COUNT * nbytes / best_s), int(1e9 * least_cpu_s / _COUNT)]
        bytes_per_s, cpu_ns = self._from_leader(found)
        self._bytes_per_s = float(bytes_per_s)
        return Probe(nbytes, self._bytes_per_s, cpu_ns / 1e9)

    def _timed(self, nbytes: int) -> tuple[float, float]:
        """Seconds, and of CPU time of this process."""
        buffers = [torch.zeros(nbytes // 4, device=self._device) for _ in range(PROBE_WINDOW)]
        self._wait(self._start(buffers[0][:1], BEFORE_PROBES), _TASK)
        self._synchronize()
        began_s, began_cpu_s = perf_counter(), process_time()
        works: deque[Any] = deque()
        for index in range(_COUNT):
            if len(works) == PROBE_WINDOW:
                self._wait(works.popleft(), _TASK)
            turn = index % PROBE_WINDOW
            works.append(self._start(buffers[turn], f"probe {nbytes}.{turn}"))
        while works:
            self._wait(works.popleft(), _TASK)
        self._synchronize()
        return perf_counter() - began_s, process_time() - began_cpu_s

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
