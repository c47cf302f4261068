"""Two results of the same measurement: what became slower, dearer or different.

Times of two runs are never compared, as machines differ and drift: a time is a multiple of
that of a peer in the same run, which is the same peer in both. Counts are compared as they are.
"""

from __future__ import annotations

import json
import math
import shlex
import statistics
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bytesched.bench.figures import opponents, round_medians
from bytesched.bench.provenance import difference
from bytesched.bench.specification import batches
from bytesched.bench.table import described
from bytesched.errors import ConfigError
from bytesched.table import aligned

#: how much a ratio of times may grow: that of two runs on a quiet machine differs by 1 to 3 %
TIME_TOLERANCE: Final = 0.05
#: the counts of a system, and how much each may grow: they depend a little on how often threads
#: wait for each other, Python calls also on the version of Python
COUNTS: Final = {
    "calls_per_tensor": ("Python calls for each tensor", 0.15),
    "messages": ("messages of an iteration", 0.05),
    "bytes": ("bytes of an iteration", 0.01),
}
#: what `same_again` leaves out
_OUTPUTS: Final = frozenset({"--json", "--png", "--record", "--compare"})
#: what earlier results may have; where it matters, the setting differs
_GONE: Final = frozenset({"--compute-scale", "--threads", "--timeout-s", "--workers"})
_SAME = "identical"
_LOSSES = "losses and weights that differ from the first system's"


@dataclass(frozen=True, slots=True)
class Change:
    """One figure of a system in both results; less is better."""

    system: str
    figure: str
    old: float
    new: float
    #: by how much it may grow
    tolerance: float

    @property
    def growth(self) -> float:
        """By how much it has grown, as a share of what it was."""
        if self.old:
            return self.new / self.old - 1
        return math.inf if self.new > 0 else 0.0

    @property
    def is_regression(self) -> bool:
        """Whether it has grown by more than it may, or cannot be told from that (NaN)."""
        return not self.growth <= self.tolerance + 1e-9

    def __str__(self) -> str:
        return (
            f"{self.system}: {self.figure}: {_shown(self.old)} was, {_shown(self.new)} is "
            f"({100 * self.growth:+.1f} %, allowed are {100 * self.tolerance:g} %)"
        )


def same_again(command: str, arguments: Sequence[str]) -> list[str]:
    """The arguments of ``command``, which a result has recorded, and after them ``arguments``.

    Files that it wrote, and what it was compared with, are left out.
    """
    recorded = shlex.split(command)
    recorded = recorded[recorded.index("bench") + 1 :] if "bench" in recorded else []
    words = [part for word in recorded for part in word.split("=", word.startswith("--"))]
    kept: list[str] = []
    flag = ""
    for word in words:
        flag = word if word.startswith("--") else flag
        if flag == "--batch" != word and "--record" in words:
            # What systems got.
            kept.append(str(batches(word)[-1]))
        elif flag not in _OUTPUTS and flag not in _GONE:
            kept.append(word)
    return [*kept, *arguments]


def load_result(path: Path) -> dict[str, Any]:
    """What ``--json`` wrote at the end. Raises `ConfigError` for any other file."""
    try:
        result: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--compare {path}: {error}") from None
    found: dict[str, Any] = result if isinstance(result, dict) else {}
    if not all(isinstance(found.get(name), dict) for name in ("systems", "setting")):
        raise ConfigError(
            f"--compare {path}: not a result of this version's `bytesched bench --json`, which has "
            "systems and a setting"
        )
    if found.get("stopped"):
        raise ConfigError(f"--compare {path}: this bench was stopped before its end")
    return found


def check_same(old: dict[str, Any], setting: dict[str, Any], network: str | None = None) -> None:
    """Raises `ConfigError` that names what differs from the setting, or network, of ``old``."""
    found = difference(old["setting"], setting)
    if not found and network is not None:
        found = difference({"network": old.get("network")}, {"network": network})
    if found:
        raise ConfigError(f"--compare: another setting: {found}")


def check_systems(old: dict[str, Any], names: Container[str]) -> None:
    """Raises `ConfigError` if a system of ours of ``old`` is not among ``names``."""
    for name in old["systems"]:
        if _is_ours(name) and name not in names:
            raise ConfigError(f"--compare: cannot compare {name}: only the old result has it")


def changes(old: dict[str, Any], new: dict[str, Any]) -> Iterator[Change]:
    """The figures that both results have, by system.

    Raises `ConfigError` if the new one lacks a figure of a system of ours that it has.
    """
    for name, before in old["systems"].items():
        if (now := new["systems"].get(name)) is None:
            continue
        if _is_ours(name) and "rounds" in before:
            yield from _times(name, old["systems"], new["systems"])
        #: what it was, what it is, by how much it may grow
        figures: dict[str, tuple[float | None, float | None, float]] = {}
        for key, (figure, tolerance) in COUNTS.items():
            was, is_now = (its.get("counts", {}).get(key) for its in (before, now))
            figures[figure] = was, is_now, tolerance
        told, tells = before.get("losses"), now.get("losses")
        if told == _SAME or (told and tells is None):
            figures[_LOSSES] = 0.0, None if tells is None else float(tells != _SAME), 0.0
        for figure, (was, is_now, tolerance) in figures.items():
            if was is not None and is_now is not None:
                yield Change(name, figure, was, is_now, tolerance)
            elif was is not None and _is_ours(name):
                raise ConfigError(
                    f"--compare: cannot compare the {figure} of {name}: only the old result has "
                    "them"
                )


def _times(name: str, *systems: dict[str, Any]) -> Iterator[Change]:
    """The time of a system of ours, as a share of that of a peer that both results have.

    Of its best peer in the old one, else in the new one, else of the plain one.
    """
    (plain, best), (_, best_now) = (opponents(name, its) for its in systems)
    peers = [p for p in (best, best_now, plain) if p and all(p in its for its in systems)]
    if peers:
        before, now = (_multiple(its[name], its[peers[0]]) for its in systems)
        yield Change(name, f"time, as a multiple of {peers[0]}'s", before, now, TIME_TOLERANCE)
    elif best or plain:
        raise ConfigError(
            f"--compare: cannot compare the time of {name}: they have no peer of it in common"
        )


def _multiple(system: dict[str, Any], peer: dict[str, Any]) -> float:
    pairs = zip(round_medians(peer), round_medians(system), strict=False)
    return 1 / statistics.median(theirs / ours for theirs, ours in pairs)


def _is_ours(name: str) -> bool:
    return name.startswith("bytesched")


def _shown(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def report(old: dict[str, Any], new: dict[str, Any]) -> tuple[str, list[Change]]:
    """A table of all changes, as text, and those that are regressions.

    Raises `ConfigError` if the results have no figure in common, or the new one lacks one of ours.
    """
    check_systems(old, new["systems"])
    found = list(changes(old, new))
    if not found:
        raise ConfigError("--compare: the two results have no figure of a system in common")
    rows = [["system", "figure", "old", "new", "change", ""]]
    for change in found:
        growth = "" if change.growth == 0 else f"{100 * change.growth:+.1f} %"
        verdict = "REGRESSION" if change.is_regression else ""
        figures = (_shown(change.old), _shown(change.new), growth, verdict)
        rows.append([change.system, change.figure, *figures])
    lines = [f"old: {described(old)}", f"new: {described(new)}", "", *aligned(rows, "<<>>><")]
    lines += [
        f"{name} is in one of them alone"
        for name in dict.fromkeys([*old["systems"], *new["systems"]])
        if name not in old["systems"] or name not in new["systems"]
    ]
    worse = [change for change in found if change.is_regression]
    lines += ["", *(f"regression: {change}" for change in worse)]
    if not worse:
        lines.append("no regression")
    return "\n".join(lines), worse
