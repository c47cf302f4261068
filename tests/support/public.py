"""The public names, for the tests of packaging and of the documents."""

from __future__ import annotations

import bytesched

#: every public name, by module; no release may lose one
PUBLIC = {
    "bytesched": list(bytesched.__all__),
    "bytesched.kvstore": ["AsyncKVStore", "Ended", "KVStore", "Key", "LocalKVStore", "describe"],
    "bytesched.plugins": ["explain_optimizer", "flush", "separable", "stats", "unwrap", "wrap"],
    "bytesched.plugins.burst": ["Background", "Branched", "Burst", "plan_for", "record"],
    "bytesched.plugins.horovod": ["ScheduledOptimizer"],
    "bytesched.plugins.mpi_kvstore": ["MPIKVStore", "open_store"],
    "bytesched.plugins.wave": ["ActivationMemory", "ModelWaves", "TickTock"],
    "bytesched.testing": [
        *("STATS", "Contract", "FakeTransport", "FaultPlan", "KVStoreContract", "LinkTransport"),
        *("Loopback", "ManualClock", "PluginContract", "SimulatedIteration", "TrainingRun"),
        *("TransportContract", "simulate"),
    ],
}
#: that of an extra which may be missing here
NEEDS = {"bytesched.plugins.horovod": "horovod", "bytesched.plugins.mpi_kvstore": "mpi4py"}
