"""Fakes for every seam, and suites that any implementation must pass.

Free of pytest: the suites are classes with ``test_`` methods. `Loopback` needs torch, and is
imported when it is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bytesched.link.simulation import LinkTransport, ManualClock, SimulatedIteration, simulate
from bytesched.testing.fakes import FakeTransport, FaultPlan
from bytesched.testing.kvstore_suite import KVStoreContract
from bytesched.testing.plugin_suite import STATS, PluginContract, TrainingRun
from bytesched.testing.transport_suite import Contract, TransportContract

if TYPE_CHECKING:
    from bytesched.plugins.loopback import Loopback

__all__ = [
    "STATS",
    "Contract",
    "FakeTransport",
    "FaultPlan",
    "KVStoreContract",
    "LinkTransport",
    "Loopback",
    "ManualClock",
    "PluginContract",
    "SimulatedIteration",
    "TrainingRun",
    "TransportContract",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name == "Loopback":
        return import_module("bytesched.plugins.loopback").Loopback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
