"""Where to look: every setting that may be tried, on a scale of ratios, around what the link wants.

A finite list. Partitions go in four steps per octave, credit is a whole number of partitions (with
any other, the last chunk of the window would never be used), so that credit is at least one
partition by construction.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice
from statistics import median
from typing import NamedTuple

from bytesched.config import Config
from bytesched.errors import ConfigError
from bytesched.link.bound import partition_seed_bytes
from bytesched.link.sizes import Probe
from bytesched.policy import named_policy
from bytesched.tunable import RunFacts, Setting
from bytesched.values import nearest, parse_size

#: credit in partitions; with more, what is urgent only waits longer
WINDOWS = (1, 2, 3, 4, 6, 8, 12, 16)
_STEPS = (1.0, 1.25, 1.5, 1.75)
_TOKEN = re.compile(r"(\w+)\s*=\s*(\S+)")


class Range(NamedTuple):
    """Both ends belong to it; 0 leaves an end open."""

    low_bytes: int = 0
    high_bytes: int = 0

    @property
    def is_open(self) -> bool:
        """True if at least one end is still to be chosen."""
        return not (self.low_bytes and self.high_bytes)

    @property
    def is_point(self) -> bool:
        """True if there is nothing to choose."""
        return not self.is_open and self.low_bytes == self.high_bytes

    def within(self, nbytes: int) -> bool:
        """Whether a size lies in it."""
        return self.low_bytes <= nbytes and (not self.high_bytes or nbytes <= self.high_bytes)


_ANY = Range()


@dataclass(frozen=True, slots=True)
class Limits:
    """What the user allows. Raises `ConfigError` if that is nothing."""

    partition: Range = _ANY
    credit: Range = _ANY
    policy: str = "priority"

    def __post_init__(self) -> None:
        for name, sizes in (("partition_bytes", self.partition), ("credit_bytes", self.credit)):
            low, high = (_size(name, end) for end in sizes)
            if high and low > high:
                raise ConfigError(f"{name}: no size is at least {low} and at most {high} bytes")
        if self.credit.high_bytes and self.credit.high_bytes < self.partition.low_bytes:
            raise ConfigError(
                f"credit_bytes at most {self.credit.high_bytes} is below partition_bytes at least "
                f"{self.partition.low_bytes}, so no full partition could ever be sent"
            )
        named_policy(self.policy)

    @classmethod
    def of(cls, config: Config) -> Limits:
        """What `config` leaves open: given sizes stay, and `tune_space` narrows the rest.

        Raises `ConfigError` for what cannot be read, and if there is a single setting.
        """
        given = {"partition_bytes": config.partition_bytes, "credit_bytes": config.credit_bytes}
        sizes = {name: Range(nbytes, nbytes) for name, nbytes in given.items()}
        for name, text in _tokens(config.tune_space):
            if name not in given:
                raise ConfigError(f"tune_space: there is no {name!r}{nearest(name, given)}")
            if given[name]:
                raise ConfigError(
                    f"tune_space looks for {name}, which is given as {given[name]}: leave out one"
                )
            sizes[name] = _range(name, text)
        limits = cls(sizes["partition_bytes"], sizes["credit_bytes"], config.policy)
        limits._check_choice()
        return limits

    def _check_choice(self) -> None:
        if self.partition.is_open:
            return
        first, *more = islice(_settings(self), 2)
        if not more:
            raise ConfigError(
                "there is nothing to tune: what partition_bytes, credit_bytes and tune_space say "
                f"leaves one setting, {first}. Leave more open, or set tune to 0"
            )

    def allow(self, setting: Setting) -> bool:
        """Whether `setting` lies within them; scheduling may always be off."""
        return not setting.enabled or (
            self.partition.within(setting.partition_bytes)
            and self.credit.within(setting.credit_bytes)
            and setting.policy == self.policy
        )

    def keep(self, setting: Setting) -> bool:
        """Whether `setting` has the sizes that are given, wherever else it lies."""
        given = (self.partition, setting.partition_bytes), (self.credit, setting.credit_bytes)
        return all(sizes.within(nbytes) for sizes, nbytes in given if sizes.is_point)

    def closed(self, partition: Range) -> Limits:
        """The same with the open ends of the partition's range taken from another."""
        low, high = self.partition
        low = low or min(partition.low_bytes, high or partition.low_bytes)
        high = high or max(partition.high_bytes, low)
        return replace(self, partition=Range(low, high))


class Space:
    """The settings within limits whose partition range is closed; at least one."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.settings = tuple(_settings(limits))
        if not self.settings:
            raise ConfigError(f"no setting has {limits.partition} and {limits.credit} bytes")

    def __len__(self) -> int:
        return len(self.settings)

    def __contains__(self, setting: Setting) -> bool:
        """Whether it lies within the limits, listed or not."""
        return setting.enabled and self.limits.allow(setting)

    def coordinates(self, setting: Setting) -> tuple[float, float]:
        """Partition and window: each in 0 to 1, on a scale of ratios; beyond an end, that end."""
        low, high = self.limits.partition
        partition = math.log2(setting.partition_bytes / low) / max(math.log2(high / low), 1.0)
        window = math.log2(setting.credit_bytes / setting.partition_bytes) / math.log2(WINDOWS[-1])
        return min(max(partition, 0.0), 1.0), min(window, 1.0)

    def nearest(self, setting: Setting) -> Setting:
        """The setting of the space that lies nearest."""
        here = self.coordinates(setting)
        return min(self.settings, key=lambda other: math.dist(here, self.coordinates(other)))

    def __repr__(self) -> str:
        low, high = self.limits.partition
        return f"<Space of {len(self)} settings, partitions of {low} to {high} bytes>"


def _settings(limits: Limits) -> Iterable[Setting]:
    for partition_bytes in _partitions(limits.partition):
        for credit_bytes in _credits(partition_bytes, limits.credit):
            yield Setting(partition_bytes, credit_bytes, limits.policy)


def _partitions(sizes: Range) -> list[int]:
    low, high = sizes
    found = {low, high}
    for exponent in range(low.bit_length() - 1, high.bit_length()):
        found |= {int(step * 2**exponent) for step in _STEPS}
    return sorted(size for size in found if low <= size <= high)


def _credits(partition_bytes: int, sizes: Range) -> list[int]:
    if sizes.is_point:
        return [sizes.low_bytes] if sizes.low_bytes >= partition_bytes else []
    found = [window * partition_bytes for window in WINDOWS]
    inside = [size for size in found if sizes.within(size)]
    least = max(sizes.low_bytes, partition_bytes)
    return inside or ([least] if sizes.within(least) else [])


def _tokens(text: str) -> Iterable[tuple[str, str]]:
    seen = set()
    for part in filter(None, re.split(r"[,\s]+", re.sub(r"\s*=\s*", "=", text.strip()))):
        found = _TOKEN.fullmatch(part)
        if not found:
            raise ConfigError(
                f"tune_space: {part!r} is not name=value, such as partition_bytes=64KiB..4MiB"
            )
        if found[1] in seen:
            raise ConfigError(f"tune_space: {found[1]} is there twice")
        seen.add(found[1])
        yield found[1], found[2]


def _range(name: str, text: str) -> Range:
    low, dots, high = text.partition("..")
    if not dots:
        low = high = text
    elif not low and not high:
        raise ConfigError(f"tune_space: {name}={text} leaves both ends open")
    return Range(_size(name, low or 0, text), _size(name, high or 0, text))


def _size(name: str, value: object, text: str = "") -> int:
    try:
        size = parse_size(value)
    except ValueError as error:
        raise ConfigError(f"{name}={text or value}: {value!r}: {error}") from None
    if not size and value != 0:
        raise ConfigError(f"{name}={text or value}: a size to be tried is not 0")
    return size


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
