"""Where to look: every setting that may be tried, on a scale of ratios, around what the link wants.

A finite list. Partitions go in four steps per octave, credit is a whole number of partitions (with
any other, the last chunk of the window would never be used) unless it is given.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

from bytesched.config import Config
from bytesched.errors import ConfigError
from bytesched.link.bound import partition_seed_bytes
from bytesched.link.sizes import Probe
from bytesched.policy import named_policy
from bytesched.tunable import RunFacts, Setting

#: credit in partitions; with more, what is urgent only waits longer
WINDOWS = (1, 2, 3, 4, 6, 8, 12, 16)
_STEPS = (1.0, 1.25, 1.5, 1.75)


@dataclass(frozen=True, slots=True)
class Given:
    """What the user has set: sizes, 0 where they are looked for, and the policy."""

    partition_bytes: int = 0
    credit_bytes: int = 0
    policy: str = "priority"

    @classmethod
    def of(cls, config: Config) -> Given:
        """What `config` has. Raises `ConfigError` if that is all there is, or no policy."""
        named_policy(config.policy)
        if config.partition_bytes and config.credit_bytes:
            raise ConfigError(
                "there is nothing to tune: partition_bytes and credit_bytes are given. Leave one "
                "open, or set tune to 0"
            )
        return cls(config.partition_bytes, config.credit_bytes, config.policy)

    def allow(self, setting: Setting) -> bool:
        """Whether `setting` keeps to that; scheduling may always be off."""
        are_kept = self.partition_bytes in (0, setting.partition_bytes) and (
            self.credit_bytes in (0, setting.credit_bytes)
        )
        return setting.policy == self.policy and (are_kept or not setting.enabled)


class Space:
    """The settings with partitions of ``low_bytes`` to ``high_bytes``, as far as none are given."""

    def __init__(self, low_bytes: int, high_bytes: int, given: Given = Given()) -> None:
        most_bytes = given.credit_bytes or high_bytes
        self.low_bytes = given.partition_bytes or min(low_bytes, most_bytes)
        self.high_bytes = given.partition_bytes or min(high_bytes, most_bytes)
        self._given = given
        self.settings = tuple(
            Setting(partition_bytes, credit_bytes, given.policy)
            for partition_bytes in self._partitions()
            for credit_bytes in self._credits(partition_bytes)
        )

    def __len__(self) -> int:
        return len(self.settings)

    def __contains__(self, setting: Setting) -> bool:
        """Whether it lies in between, listed or not."""
        return (
            setting.enabled
            and self.low_bytes <= setting.partition_bytes <= self.high_bytes
            and self._given.allow(setting)
        )

    def coordinates(self, setting: Setting) -> tuple[float, float]:
        """Partition and window: each in 0 to 1, on a scale of ratios; beyond an end, that end."""
        octaves = max(math.log2(self.high_bytes / self.low_bytes), 1.0)
        partition = math.log2(setting.partition_bytes / self.low_bytes) / octaves
        window = math.log2(setting.credit_bytes / setting.partition_bytes) / math.log2(WINDOWS[-1])
        return min(max(partition, 0.0), 1.0), min(window, 1.0)

    def nearest(self, setting: Setting) -> Setting:
        """The setting of the space that lies nearest."""
        here = self.coordinates(setting)
        return min(self.settings, key=lambda other: math.dist(here, self.coordinates(other)))

    def _partitions(self) -> Iterator[int]:
        low, high = self.low_bytes, self.high_bytes
        octaves = range(low.bit_length() - 1, high.bit_length())
        steps = {int(step * 2**octave) for octave in octaves for step in _STEPS}
        yield from sorted(size for size in steps | {low, high} if low <= size <= high)

    def _credits(self, partition_bytes: int) -> Iterator[int]:
        given = self._given.credit_bytes
        yield from [given] if given else [window * partition_bytes for window in WINDOWS]

    def __repr__(self) -> str:
        sizes = f"{self.low_bytes} to {self.high_bytes} bytes"
        return f"<Space of {len(self)} settings, partitions of {sizes}>"


# -- from the link and the model -------------------------------------------------------

#: of the CPU time that a chunk costs, the process sees about half; the rest is the kernel's
_UNSEEN = 2.0
#: partitions are looked for from the untuned one over this to the larger seed times that
_BELOW, _ABOVE = 4, 16
_SMALLEST_BYTES = 32 * 1024
_LARGEST_BYTES = 64 << 20
_SEED_WINDOW = 2


@dataclass(frozen=True, slots=True)
class Link:
    """A chunk of n bytes occupies it for ``overhead_s + n / bytes_per_s`` seconds."""

    overhead_s: float
    bytes_per_s: float

    def seconds(self, nbytes: float) -> float:
        """How long a chunk occupies it."""
        return self.overhead_s + nbytes / self.bytes_per_s

    def __str__(self) -> str:
        return f"{self.bytes_per_s / 1e6:.4g} MB/s, {1e3 * self.overhead_s:.2g} ms per chunk"


def fit_probes(probes: Sequence[Probe]) -> Link:
    """The link as it is when nothing else runs, from at least one probe, by growing size.

    A line through their times, by Theil and Sen: the slope is the median of those between all
    pairs, which a quarter of wild values does not move.
    """
    points = [(probe.nbytes, probe.nbytes / probe.bytes_per_s) for probe in probes]
    slopes = [
        (high_s - low_s) / (high - low)
        for (low, low_s), (high, high_s) in combinations(points, 2)
        if high > low
    ]
    slope = median(slopes) if slopes else 0.0
    # Two chunks in flight hide their overhead from each other, but not what they cost the cores.
    least_s = _UNSEEN * probes[0].cpu_s
    if slope <= 0:
        # One size, or noise alone: all of the time is the bandwidth's.
        return Link(least_s, median(probe.bytes_per_s for probe in probes))
    overhead_s = median(seconds - slope * nbytes for nbytes, seconds in points)
    return Link(max(overhead_s, least_s), 1 / slope)


def seed_bytes(facts: RunFacts, link: Link) -> int:
    """The partition δ* = sqrt(θBS/(k + 1)) that the bound wants (see bound.py)."""
    return partition_seed_bytes(
        total_bytes=facts.model_bytes,
        overhead_s=link.overhead_s,
        bytes_per_s=link.bytes_per_s,
        credit_partitions=_SEED_WINDOW,
    )


def seeded_space(given: Given, facts: RunFacts, link: Link) -> Space:
    """The space around what the link wants and what would hold without a tuner."""
    centers = (facts.untuned.partition_bytes, seed_bytes(facts, link))
    # Below what fills the link there are only more chunks.
    low = max(_power_of_two(facts.untuned.partition_bytes // _BELOW), _SMALLEST_BYTES)
    high = min(_power_of_two(max(centers) * _ABOVE), _LARGEST_BYTES)
    # A partition beyond the model is the model.
    high = min(high, 2 * _power_of_two(facts.model_bytes))
    return Space(low, max(low, high), given)


def _power_of_two(number: int) -> int:
    """The largest one that is not above."""
    return 1 << (max(number, 1).bit_length() - 1)
