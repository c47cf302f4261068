"""Moments of a host and of a device, and how fast a device's carrier is."""

from __future__ import annotations

from time import perf_counter_ns
from typing import Any, Final, Protocol

import torch

from .wire import Wire

__all__ = ["Clock", "DeviceClock", "HostClock"]

_S: Final = 1e9
#: of a probe, and how many follow one another
_PROBE_BYTES: Final = 8 << 20
_PROBES: Final = 4
#: how much longer a chunk takes beside kernels than alone: 8 MiB took 2.9 ms alone and 3.5 to 4.2
#: beside those of a transformer, two ranks on an H200
_BESIDE: Final = 1.3


class Clock(Protocol):
    """What happens when, for the calling thread or what it has queued."""

    def moment(self) -> Any:
        """Now; on a device, when all that the current stream has queued by now is computed."""

    def seconds(self, began: Any, ended: Any) -> float:
        """From one moment to another; returns when both have come."""

    def probe(self, wire: Wire) -> Any:
        """Queues sums that show how long a byte takes; None: known from ends of chunks.

        Collective; nobody waits for it.
        """

    def seconds_per_byte(self, probe: Any) -> float:
        """What ``probe`` has shown, beside compute."""


class HostClock:
    """Of this host."""

    def moment(self) -> Any:
        return perf_counter_ns()

    def seconds(self, began: Any, ended: Any) -> float:
        return float(ended - began) / _S

    def probe(self, wire: Wire) -> Any:
        return None

    def seconds_per_byte(self, probe: Any) -> float:
        raise AssertionError("a host sees ends")


class DeviceClock:
    """Of a CUDA device, by events: the host is ahead of it, and sees no collective end."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def moment(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, began: Any, ended: Any) -> float:
        began.synchronize()
        ended.synchronize()
        elapsed_ms: float = began.elapsed_time(ended)
        return elapsed_ms / 1e3

    def probe(self, wire: Wire) -> Any:
        scratch = torch.zeros(_PROBE_BYTES, dtype=torch.uint8, device=self._device)
        sent = scratch.view(torch.float32)
        wire.wait(wire.start(sent), "a probe")
        began = self.moment()
        works = [wire.start(sent) for _ in range(_PROBES)]
        for work in works:
            wire.wait(work, "a probe")
        return began, self.moment()

    def seconds_per_byte(self, probe: Any) -> float:
        return _BESIDE * self.seconds(*probe) / (_PROBES * _PROBE_BYTES)
