"""How far a tuning is, on a terminal or in a log."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Protocol

from .file import TuningFile

__all__ = ["Progress", "progress_for", "summary"]


class Progress(Protocol):
    """Shows what is in a tuning file; a context manager."""

    def __enter__(self) -> Progress: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def show(self, tuning: TuningFile) -> None:
        """The file has changed."""

    def pass_on(self, line: str) -> None:
        """A line that the training has printed."""


def progress_for(steps: int) -> Progress:
    """A bar if this is a terminal that `rich` can draw on, else lines."""
    if sys.stderr.isatty():
        try:
            return _Bar(steps)
        except ImportError:
            pass
    return _Lines(steps)


def summary(tuning: TuningFile) -> str:
    """The trials so far in one line."""
    tried = [trial for trial in tuning.trials if trial.phase == "search"]
    measured = [t for t in tuning.trials if t.step_ms > 0 and t.phase in ("baseline", "search")]
    if not measured:
        return "measuring the untuned setting"
    best = min(measured, key=lambda trial: trial.step_ms)
    gain = 100 * (1 - best.step_ms / measured[0].step_ms)
    number = f"trial {len(tried)} of about {len(tried) + tuning.more_trials}"
    return f"{number}, best {best.step_ms:.1f} ms, {gain:.1f} % gained: {best.setting}"


class _Lines:
    def __init__(self, steps: int) -> None:
        self._steps = steps

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, tuning: TuningFile) -> None:
        print(f"tune: {tuning.steps} of {self._steps} steps, {summary(tuning)}", file=sys.stderr)

    def pass_on(self, line: str) -> None:
        print(line, end="", flush=True)


class _Bar:
    def __init__(self, steps: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as RichProgress

        self._bar: Any = RichProgress(
            TextColumn("tune"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}")
        )
        self._task = self._bar.add_task("waiting for the first step", total=steps)

    def __enter__(self) -> _Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, tuning: TuningFile) -> None:
        self._bar.update(self._task, completed=tuning.steps, description=summary(tuning))

    def pass_on(self, line: str) -> None:
        self._bar.console.out(line, end="", highlight=False)
