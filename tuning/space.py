"""Where to look: every setting that may be tried, on a scale of ratios.

A finite list. Partitions go in four steps per octave, credit is a whole number of partitions (with
any other, the last chunk of the window would never be used), so that credit is at least one
partition by construction.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

from bytesched.config import Config
from bytesched.errors import ConfigError
from bytesched.policy import named_policy
from bytesched.tunable import Setting
from bytesched.values import nearest, parse_size

__all__ = ["Limits", "Range", "Space"]

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
        #: the ends of what varies, by index into `_RAW`
        self._axes = {}
        for index, raw in enumerate(_RAW):
            values = [raw(setting) for setting in self.settings]
            if max(values) > min(values):
                self._axes[index] = min(values), max(values)

    def __len__(self) -> int:
        return len(self.settings)

    def __contains__(self, setting: Setting) -> bool:
        """Whether it lies within the limits, listed or not."""
        return setting.enabled and self.limits.allow(setting)

    @property
    def dimensions(self) -> int:
        """How many coordinates a setting has: what does not vary has none."""
        return len(self._axes)

    def coordinates(self, setting: Setting) -> list[float]:
        """Where it lies: each in 0 to 1, on a scale of ratios; beyond an end, that end."""
        return [
            min(max((value - low) / (high - low), 0.0), 1.0)
            for (low, high), value in (
                (bounds, _RAW[index](setting)) for index, bounds in self._axes.items()
            )
        ]

    def nearest(self, setting: Setting) -> Setting:
        """The setting of the space that lies nearest."""
        here = self.coordinates(setting)
        return min(self.settings, key=lambda other: math.dist(here, self.coordinates(other)))

    def __repr__(self) -> str:
        low, high = self.limits.partition
        return f"<Space of {len(self)} settings, partitions of {low} to {high} bytes>"


#: what varies between settings, as numbers
_RAW: tuple[Callable[[Setting], float], ...] = (
    lambda setting: math.log2(setting.partition_bytes),
    lambda setting: math.log2(setting.credit_bytes / setting.partition_bytes),
)


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
