"""What a link allows: the bound T*, and the sizes of chunks that come near it.

A simulated link is in `bytesched.link.simulation`.
"""

from __future__ import annotations

from bytesched.link.bound import (
    Layer,
    exchanging_optimum_s,
    gradients,
    optimum_s,
    partition_seed_bytes,
)
from bytesched.link.sizes import RULES, Probe, Rule, chosen_sizes, probe_sizes

__all__ = [
    "RULES",
    "Layer",
    "Probe",
    "Rule",
    "chosen_sizes",
    "exchanging_optimum_s",
    "gradients",
    "optimum_s",
    "partition_seed_bytes",
    "probe_sizes",
]
