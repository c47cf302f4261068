"""The file that remembers a tuning: for which cluster and model, what was tried, what was adopted.

Written by `bytesched.tuning`, printed by `bytesched report`. Every field is checked on reading, for
a file may be from anyone.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bytesched.errors import ConfigError
from bytesched.files import read_text
from bytesched.tunable import Setting
from bytesched.values import parse_name

__all__ = ["Fingerprint", "Trial", "TuningFile"]

FORMAT = "bytesched tuning"
VERSION = 1
STATES = ("running", "done")
#: two measurements of one link differ by less
_SAME_BANDWIDTH = 1.6
_SAME_OVERHEAD = 4.0
_NO_OVERHEAD_S = 1e-3
#: above any number that a file may hold
_LARGEST = 1e18


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a tuned setting is good for."""

    backend: str
    ranks_per_host: tuple[int, ...]
    device: str
    #: versions of what computes, and of bytesched
    framework: str
    version: str
    #: of the model and how it is trained (see tunable.RunFacts), and the bytes of its gradients
    signature: str
    model_bytes: int
    #: the link as it was fitted, rounded
    bytes_per_s: float
    overhead_s: float

    @property
    def name(self) -> str:
        """A file name that differs where the fingerprint does, but for the link."""
        parts = json.dumps([str(value) for value in self._identity()])
        return hashlib.sha256(parts.encode()).hexdigest()[:16]

    def is_same(self, other: Fingerprint) -> bool:
        """Whether what holds for `other` holds here."""
        return self.is_same_case(other) and self._same_link(other)

    def is_same_case(self, other: Fingerprint) -> bool:
        """Whether no more than the link, as it was measured, differs."""
        return self._identity() == other._identity()

    def ratio_of_rates(self, other: Fingerprint) -> float:
        """How many times as fast the faster one of the two links is."""
        slow, fast = sorted((self.bytes_per_s, other.bytes_per_s))
        return fast / slow

    def is_same_cluster(self, other: Fingerprint) -> bool:
        """Whether only the model or a version differs."""
        return (
            self.backend == other.backend
            and self.ranks_per_host == other.ranks_per_host
            and self.device == other.device
            and self._same_link(other)
        )

    def _identity(self) -> tuple[object, ...]:
        return (
            self.backend,
            self.ranks_per_host,
            self.device,
            self.framework,
            self.version,
            self.signature,
            self.model_bytes,
        )

    def _same_link(self, other: Fingerprint) -> bool:
        low_s, high_s = sorted((self.overhead_s, other.overhead_s))
        return self.ratio_of_rates(other) <= _SAME_BANDWIDTH and (
            high_s <= _SAME_OVERHEAD * low_s or high_s <= _NO_OVERHEAD_S
        )


@dataclass(frozen=True, slots=True)
class Trial:
    """A setting, and the steps that were measured under it."""

    setting: Setting
    #: "baseline", "search" or "guard"
    phase: str
    step_ms: float
    durations_ms: tuple[float, ...]
    cut: bool = False


@dataclass(frozen=True, slots=True)
class TuningFile:
    """The content of one file."""

    fingerprint: Fingerprint
    untuned: Setting
    #: what was adopted, once the state is "done"
    setting: Setting | None
    state: str
    trials: tuple[Trial, ...]
    #: what the tuning took, so far
    steps: int
    #: of the settings that took turns at the end, medians
    step_ms: float = math.nan
    untuned_ms: float = math.nan
    off_ms: float = math.nan
    #: ISO 8601, UTC
    saved_at: str = ""
    #: about as many candidates will follow, while it is "running"
    more_trials: int = 0

    @property
    def gain_pct(self) -> float:
        """How much less time a step takes than untuned; NaN if that is not known."""
        if not self.untuned_ms:
            return math.nan
        return 100 * (1 - self.step_ms / self.untuned_ms)

    def paste(self) -> str:
        """The adopted setting as a line for the command line; empty if there is none."""
        if self.setting is None:
            return ""
        if not self.setting.enabled:
            return "BYTESCHED_ENABLED=0"
        fields = [
            f"BYTESCHED_PARTITION_BYTES={self.setting.partition_bytes}",
            f"BYTESCHED_CREDIT_BYTES={self.setting.credit_bytes}",
        ]
        if self.setting.policy != self.untuned.policy:
            fields.append(f"BYTESCHED_POLICY={self.setting.policy}")
        return " ".join(fields)

    def to_json(self) -> dict[str, Any]:
        """The content as JSON takes it."""
        content = asdict(self)
        content["trials"] = [
            asdict(trial) | {"durations_ms": [_ms(value) for value in trial.durations_ms]}
            for trial in self.trials
        ]
        for owner in (content, *content["trials"]):
            for name in ("step_ms", "untuned_ms", "off_ms"):
                if name in owner:
                    owner[name] = _ms(owner[name])
        return {"format": FORMAT, "version": VERSION, **content}

    @classmethod
    def read(cls, path: Path) -> TuningFile:
        """The content of a file. ValueError if it is no tuning of ours, OSError as it comes."""
        text = read_text(path)
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"no valid JSON: {error}") from None
        return cls.of(content)

    @classmethod
    def of(cls, content: object) -> TuningFile:
        """The tuning that decoded JSON describes. ValueError if it describes none."""
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError("not the memory of a tuning")
        if content.get("version") != VERSION:
            raise ValueError(f"of version {content.get('version')!r}, not {VERSION}")
        fields = _Fields(content)
        state = fields.text("state")
        if state not in STATES:
            raise ValueError(f"state is {state!r}")
        adopted = content.get("setting")
        if (adopted is not None) != (state == "done"):
            raise ValueError(f"state is {state!r} with the setting {adopted!r}")
        return cls(
            fingerprint=_fingerprint(_Fields(content.get("fingerprint"))),
            untuned=_setting(content.get("untuned")),
            setting=None if adopted is None else _setting(adopted),
            state=state,
            trials=tuple(_trial(_Fields(trial)) for trial in fields.list("trials")),
            steps=int(fields.number("steps")),
            step_ms=fields.number("step_ms", optional=True),
            untuned_ms=fields.number("untuned_ms", optional=True),
            off_ms=fields.number("off_ms", optional=True),
            saved_at=fields.text("saved_at"),
            more_trials=int(fields.number("more_trials")),
        )


class _Fields:
    """A JSON object whose fields are of the type that is asked for, or ValueError."""

    def __init__(self, content: object) -> None:
        if not isinstance(content, Mapping):
            raise ValueError(f"an object was expected, not {content!r:.60}")
        self._content = content

    def text(self, name: str) -> str:
        value = self._content.get(name)
        if not isinstance(value, str):
            raise ValueError(f"{name} is {value!r:.60}, not a text")
        return value

    def number(self, name: str, *, optional: bool = False) -> float:
        value = self._content.get(name)
        if value is None and optional:
            return math.nan
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name} is {value!r:.60}, not a number")
        if not 0 <= value < _LARGEST:
            raise ValueError(f"{name} is {value!r:.60}, expected 0 or more")
        return float(value)

    def list(self, name: str) -> list[object]:
        value = self._content.get(name)
        if not isinstance(value, list):
            raise ValueError(f"{name} is {value!r:.60}, not a list")
        return value

    def flag(self, name: str) -> bool:
        value = self._content.get(name)
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {value!r:.60}, not true or false")
        return value


def _fingerprint(fields: _Fields) -> Fingerprint:
    ranks = fields.list("ranks_per_host")
    if not ranks or not all(type(count) is int and 0 < count < _LARGEST for count in ranks):
        raise ValueError(f"ranks_per_host is {ranks!r:.60}")
    bytes_per_s = fields.number("bytes_per_s")
    if not bytes_per_s:
        raise ValueError("bytes_per_s is 0")
    return Fingerprint(
        backend=fields.text("backend"),
        ranks_per_host=tuple(int(str(count)) for count in ranks),
        device=fields.text("device"),
        framework=fields.text("framework"),
        version=fields.text("version"),
        signature=fields.text("signature"),
        model_bytes=int(fields.number("model_bytes")),
        bytes_per_s=bytes_per_s,
        overhead_s=fields.number("overhead_s"),
    )


def _setting(content: object) -> Setting:
    fields = _Fields(content)
    try:
        return Setting(
            int(fields.number("partition_bytes")),
            int(fields.number("credit_bytes")),
            parse_name(fields.text("policy")),
            fields.flag("enabled"),
        )
    except ConfigError as error:
        raise ValueError(str(error)) from None


def _trial(fields: _Fields) -> Trial:
    durations = fields.list("durations_ms")
    if not all(isinstance(value, int | float) and 0 <= value < _LARGEST for value in durations):
        raise ValueError("durations_ms are not all numbers")
    return Trial(
        setting=_setting(fields._content.get("setting")),
        phase=fields.text("phase"),
        step_ms=fields.number("step_ms", optional=True),
        durations_ms=tuple(float(str(value)) for value in durations),
        cut=fields.flag("cut"),
    )


def _ms(value: float) -> float | None:
    return round(value, 3) if math.isfinite(value) else None
