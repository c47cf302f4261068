"""Where to look for a setting, from the link and the model: the seed, and the space around it."""

from __future__ import annotations

from bytesched.link.bound import partition_seed_bytes
from bytesched.tunable import RunFacts

from .fit import Link
from .space import Limits, Range, Space

__all__ = ["seed_bytes", "seeded_space"]

#: partitions are looked for from the untuned one over this to the larger seed times that
_BELOW, _ABOVE = 4, 16
_SMALLEST_BYTES = 32 * 1024
_LARGEST_BYTES = 64 << 20
_SEED_WINDOW = 2


def seed_bytes(facts: RunFacts, link: Link) -> int:
    """The partition δ* = sqrt(θBS/(k + 1)) that the bound wants (see bound.py)."""
    return partition_seed_bytes(
        total_bytes=facts.model_bytes,
        overhead_s=link.overhead_s,
        bytes_per_s=link.bytes_per_s,
        credit_partitions=_SEED_WINDOW,
    )


def seeded_space(limits: Limits, facts: RunFacts, link: Link) -> Space:
    """The space around what the link wants and what would hold without a tuner."""
    centers = (facts.untuned.partition_bytes, seed_bytes(facts, link))
    # Below what fills the link there are only more chunks.
    low = max(_power_of_two(facts.untuned.partition_bytes // _BELOW), _SMALLEST_BYTES)
    high = min(_power_of_two(max(centers) * _ABOVE), _LARGEST_BYTES)
    # A partition beyond the model is the model.
    high = min(high, 2 * _power_of_two(facts.model_bytes))
    return Space(limits.closed(Range(low, max(low, high))))


def _power_of_two(number: int) -> int:
    """The largest one that is not above."""
    return 1 << (max(number, 1).bit_length() - 1)
