"""The file that remembers a tuning: for which cluster and model, what was tried, what was adopted.

Written by `bytesched.tuning`, printed by `bytesched report`. Every field is checked on reading, for
a file may be from anyone.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import Any

from bytesched.errors import ConfigError
from bytesched.files import read_text
from bytesched.records import from_json
from bytesched.tunable import Setting

FORMAT = "bytesched tuning"
VERSION = 1
#: above any number that a file may hold
_LARGEST = 1e18
#: what is null in a file, and NaN here, where nothing was measured
_MEASURED = ("step_ms", "untuned_ms", "off_ms")
#: of settings in files of version 0.2.0
_DROPPED = ("order",)


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
        """A file name that differs where more does than the link, which never measures alike."""
        parts = json.dumps([str(value) for value in astuple(self)[:-2]])
        return hashlib.sha256(parts.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Trial:
    """A setting, and the steps that were measured under it."""

    setting: Setting
    #: "baseline", "search" or "guard"
    phase: str
    step_ms: float
    durations_ms: tuple[float, ...]
    #: clearly worse, so that no more steps were spent on it
    cut: bool = False


@dataclass(frozen=True, slots=True)
class TuningFile:
    """The content of one file."""

    fingerprint: Fingerprint
    untuned: Setting
    #: what was adopted
    setting: Setting
    trials: tuple[Trial, ...]
    #: what the tuning took
    steps: int
    #: of the settings that took turns at the end, medians
    step_ms: float = math.nan
    untuned_ms: float = math.nan
    off_ms: float = math.nan
    #: ISO 8601, UTC
    saved_at: str = ""

    @property
    def gain_pct(self) -> float:
        """How much less time a step takes than untuned; NaN if that is not known."""
        if not self.untuned_ms:
            return math.nan
        return 100 * (1 - self.step_ms / self.untuned_ms)

    def to_json(self) -> dict[str, Any]:
        """The content as JSON takes it."""
        return {"format": FORMAT, "version": VERSION, **_rounded(asdict(self))}

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
        if content.get("setting") is None:
            raise ValueError("it came to no end: remove it")
        # A later one may have written more.
        known = {field.name for field in fields(cls)}
        try:
            mine = _filled({name: content[name] for name in content.keys() & known})
            tuning = from_json(cls, json.dumps(mine))
        except (ConfigError, RecursionError) as error:
            raise ValueError(str(error)) from None
        hosts = tuning.fingerprint.ranks_per_host
        if not (tuning.fingerprint.bytes_per_s and hosts and all(hosts)):
            raise ValueError(f"no cluster has {tuning.fingerprint}")
        return tuning


def _rounded(value: Any) -> Any:
    """The same for JSON, which has no NaN."""
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return value


def _filled(value: Any) -> Any:
    """What `_rounded` has made this of. ValueError for numbers that nothing of ours has."""
    if isinstance(value, dict):
        return {
            name: math.nan if each is None and name in _MEASURED else _filled(each)
            for name, each in value.items()
            if name not in _DROPPED
        }
    if isinstance(value, list):
        return [_filled(each) for each in value]
    if isinstance(value, int | float) and not 0 <= value < _LARGEST:
        raise ValueError(f"{value!r:.60} is there, expected 0 or more")
    return value
