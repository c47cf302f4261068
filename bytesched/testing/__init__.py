"""Fakes for every seam, and suites that any implementation must pass.

Free of frameworks, of pytest too: the suites are classes with ``test_`` methods.
"""

from __future__ import annotations

from bytesched.link.simulation import LinkTransport, ManualClock, SimulatedIteration, simulate
from bytesched.testing.fakes import FakeTransport, FaultPlan
from bytesched.testing.kvstore import KVStoreContract
from bytesched.testing.plugin import STATS, PluginContract, TrainingRun
from bytesched.testing.transport import Contract, TransportContract

__all__ = [
    "STATS",
    "Contract",
    "FakeTransport",
    "FaultPlan",
    "KVStoreContract",
    "LinkTransport",
    "ManualClock",
    "PluginContract",
    "SimulatedIteration",
    "TrainingRun",
    "TransportContract",
    "simulate",
]
