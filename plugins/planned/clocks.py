"""Moments of a host and of a device, and how fast a device's carrier is."""

from __future__ import annotations

from time import perf_counter_ns
from typing import Any, Final, Protocol

import torch

from .wire import Wire

__all__ = ["PROBE", "Clock", "DeviceClock", "HostClock"]

#: the key of the first sum of a probe, for which ranks wait before they make the others
PROBE: Final = "probe"
_S: Final = 1e9
#: of a probe on a device and on a host, and how many follow one another
_PROBE_BYTES: Final = 8 << 20
_HOST_PROBE_BYTES: Final = 1 << 20
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
        """Sums that show how long a byte takes; None: known from ends of chunks.

        Collective. On a device they are queued, and nobody waits for them; on a host the caller
        does. Raises `TransportError`.
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
        if wire.sees_ends:
            return None
        scratch = torch.zeros(_HOST_PROBE_BYTES, dtype=torch.uint8, device="cpu")
        return _probed(self, wire, scratch)

    def seconds_per_byte(self, probe: Any) -> float:
        return self.seconds(*probe) / (_PROBES * _HOST_PROBE_BYTES)


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
        return _probed(self, wire, scratch)

    def seconds_per_byte(self, probe: Any) -> float:
        return _BESIDE * self.seconds(*probe) / (_PROBES * _PROBE_BYTES)


def _probed(clock: Clock, wire: Wire, scratch: torch.Tensor) -> tuple[Any, Any]:
    """The moments between which so many sums of ``scratch`` were made, after one more."""
    sent = scratch.view(torch.float32)
    wire.wait(wire.start(sent, PROBE), "a probe")
    began = clock.moment()
    works = [wire.start(sent, f"{PROBE} {number}") for number in range(_PROBES)]
    for work in works:
        wire.wait(work, "a probe")
    return began, clock.moment()
