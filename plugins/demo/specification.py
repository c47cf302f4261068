"""What the demo trains, for itself and for its ranks."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DemoSpecification", "Trained"]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A run: a system, and where its timeline goes."""

    kind: str
    options: dict[str, str]
    #: empty: none is written
    trace_folder: str


@dataclass(frozen=True, kw_only=True)
class DemoSpecification:
    """What every rank of the demo trains."""

    runs: tuple[Trained, ...]
    steps: int
    #: after which no turn is begun
    train_s: float
