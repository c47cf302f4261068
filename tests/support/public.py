"""The public names, for the tests of the surface and of the documents."""

from __future__ import annotations

import bytesched

#: every public name, by module; one that goes stands in CHANGELOG.md
PUBLIC = {
    "bytesched": list(bytesched.__all__),
    "bytesched.kvstore": ["AsyncKVStore", "Ended", "KVStore", "Key", "LocalKVStore", "describe"],
    "bytesched.plugins": ["explain_optimizer", "flush", "separable", "stats", "unwrap", "wrap"],
    "bytesched.plugins.burst": ["Background", "Branched", "Burst", "plan_for", "record"],
    "bytesched.plugins.graphs": ["GraphConv", "Partition", "aggregate"],
    "bytesched.plugins.horovod": ["ScheduledOptimizer"],
    "bytesched.plugins.moe": [
        *("DTSGate", "Grid", "MoE", "Temperature", "TopKGate", "clip_grad_norm_", "data_parallel"),
        *("exchange", "expert_groups", "full_state_dict", "own_experts"),
        "reduce_expert_gradients",
    ],
    "bytesched.plugins.mpi_kvstore": ["MPIKVStore", "open_store"],
    "bytesched.plugins.pipelines": ["ordered_schedule"],
    "bytesched.plugins.wave": ["ActivationMemory", "ModelWaves", "TickTock"],
    "bytesched.testing": ["KVStoreContract"],
}
#: what an extra is needed for that may be missing, or that would start MPI
ELSEWHERE = {"bytesched.plugins.horovod", "bytesched.plugins.mpi_kvstore"}
