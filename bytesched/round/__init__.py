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
    TAKEN,
    TO_COME,
    UNTAKEN,
    Gradient,
    GradientEvent,
    GradientState,
)
from bytesched.round.machine import Round

__all__ = [
    "AFTER",
    "BUNDLE_AFTER",
    "OUTSTANDING",
    "TAKEN",
    "TO_COME",
    "UNTAKEN",
    "Bundle",
    "BundleEvent",
    "BundleState",
    "Gradient",
    "GradientEvent",
    "GradientState",
    "Job",
    "Round",
]
