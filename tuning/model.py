"""What a setting would take, before it is tried: a recorded iteration over the fitted link.

The chunks go through the real `SchedulerCore`; only the link is a model. It ranks settings well
and predicts times badly, so only the ranks are used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median

from bytesched.link.bound import partition_seed_bytes
from bytesched.link.simulation import simulate
from bytesched.policy import named_policy
from bytesched.tunable import Recording, RunFacts, Setting

from .fit import Link
from .space import Limits, Range, Space

__all__ = ["IterationModel", "median_recording", "seed_bytes", "seeded_space"]

#: a setting that the model puts so much above its best is not tried
_HOPELESS = 1.15
#: partitions are looked for from the untuned one over this to the larger seed times that
_BELOW, _ABOVE = 4, 16
_SMALLEST_BYTES = 32 * 1024
_LARGEST_BYTES = 64 << 20
_SEED_WINDOW = 2
#: more chunks than that take longer to simulate than they are worth
_MOST_CHUNKS = 3000


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


def median_recording(recordings: Sequence[Recording]) -> Recording | None:
    """One iteration from several: times are medians; sends are those of all of them."""
    if not recordings:
        return None
    last = recordings[-1]
    alike = [one for one in recordings if one.sizes_bytes == last.sizes_bytes]
    return Recording(
        last.sizes_bytes,
        tuple(map(median, zip(*(one.releases_s for one in alike), strict=True))),
        tuple(map(median, zip(*(one.forward_s for one in alike), strict=True))),
        tuple(send for one in alike for send in one.sends),
    )


class IterationModel:
    """One recorded iteration over one link."""

    def __init__(self, recording: Recording, link: Link) -> None:
        self._recording = recording
        self._link = link
        self._known: dict[Setting, float] = {}

    def step_s(self, setting: Setting) -> float:
        """What a step would take; infinite if it is not worth finding out."""
        if setting not in self._known:
            self._known[setting] = self._simulated(setting)
        return self._known[setting]

    def _simulated(self, setting: Setting) -> float:
        if sum(self._recording.sizes_bytes) > _MOST_CHUNKS * setting.partition_bytes:
            return math.inf
        return simulate(
            self._recording.releases_s,
            self._recording.sizes_bytes,
            self._recording.forward_s,
            bytes_per_s=self._link.bytes_per_s,
            overhead_s=self._link.overhead_s,
            latency_s=self._link.latency_s,
            partition_bytes=setting.partition_bytes,
            credit_bytes=setting.credit_bytes,
            policy=named_policy(setting.policy),
            merge=True,
        ).step_s

    def ranked(self, settings: Iterable[Setting]) -> list[Setting]:
        """The settings, the most promising one first."""
        return sorted(settings, key=self.step_s)

    def promising(self, space: Space, untuned: Setting) -> Space:
        """The space without what is hopeless, unless it is near the untuned setting."""
        least_s = min(map(self.step_s, space.settings))
        return space.only(
            setting
            for setting in space.settings
            if self.step_s(setting) <= _HOPELESS * least_s or _near(setting, untuned, octaves=1.0)
        )

    def first_trials(self, space: Space, count: int) -> list[Setting]:
        """The most promising settings, of partitions that differ at least by half an octave."""
        chosen: list[Setting] = []
        for setting in self.ranked(space.settings):
            if not any(_near(setting, other, octaves=0.5) for other in chosen):
                chosen.append(setting)
            if len(chosen) == count:
                break
        return chosen


def _near(one: Setting, other: Setting, *, octaves: float) -> bool:
    return abs(math.log2(one.partition_bytes / other.partition_bytes)) < octaves
