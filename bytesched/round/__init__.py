"""A round: what happens to each gradient from backward to its update, as tables of states."""

from bytesched.round.bundle import (
    BUNDLE_AFTER,
    OUTSTANDING,
    Bundle,
    BundleEvent,
    BundleState,
    Job,
)
from bytesched.round.gradient import (
    AFTER,
    ALLOWED,
    LENT,
    MEMORY_AFTER,
    TAKEN,
    TO_COME,
    UNREADABLE,
    UNTAKEN,
    Gradient,
    GradientEvent,
    GradientState,
    Memory,
    MemoryEvent,
    Use,
    on_memory,
)
from bytesched.round.machine import Round
from bytesched.round.under_way import UnderWay

__all__ = [
    "AFTER",
    "ALLOWED",
    "BUNDLE_AFTER",
    "LENT",
    "MEMORY_AFTER",
    "OUTSTANDING",
    "TAKEN",
    "TO_COME",
    "UNREADABLE",
    "UNTAKEN",
    "Bundle",
    "BundleEvent",
    "BundleState",
    "Gradient",
    "GradientEvent",
    "GradientState",
    "Job",
    "Memory",
    "MemoryEvent",
    "Round",
    "UnderWay",
    "Use",
    "on_memory",
]
