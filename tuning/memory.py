"""What a tuning finds: told in the log, and kept in a file per cluster and model, found again.

Nothing here ends a training: what cannot be read or written is named in a warning and left alone.
"""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from bytesched.environment import user_cache_folder
from bytesched.files import write_text
from bytesched.tunable import Setting

from .controller import Adopted, Report
from .file import Fingerprint, Trial, TuningFile

log = logging.getLogger("bytesched")


class Memory:
    """What is known about clusters.

    Args:
        file: reads and writes this file only; empty: a folder with one per fingerprint.
        folder: that folder, if it is not the user's cache folder.
    """

    def __init__(self, file: str | Path = "", *, folder: Path | None = None) -> None:
        self._file = Path(file) if file else None
        self._folder = folder or user_cache_folder() / "bytesched" / "tuning"
        self._complained: set[str] = set()

    def find(self, fingerprint: Fingerprint) -> TuningFile | None:
        """The tuning of this case, if there is one.

        Its link may have been another one: what a step takes will show that (see times.Drift).
        """
        path = self.path_of(fingerprint)
        try:
            known = TuningFile.read(path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self._complain(path, f"is ignored: {error}")
            return None
        return known if known.fingerprint.name == fingerprint.name else None

    def path_of(self, fingerprint: Fingerprint) -> Path:
        """Where a tuning of this case belongs."""
        return self._file or self._folder / f"{fingerprint.name}.json"

    def save(self, tuning: TuningFile) -> Path | None:
        """Writes a tuning in one piece; where it is now, or None if it could not be written."""
        path = self.path_of(tuning.fingerprint)
        now = datetime.now(timezone.utc).isoformat(timespec="microseconds")
        content = json.dumps(replace(tuning, saved_at=now).to_json(), indent=1)
        try:
            if self._file is not None and path.exists():
                TuningFile.read(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, content + "\n", durable=True)
        except ValueError as error:
            # Whatever it is, the user named it and would miss it.
            self._complain(path, f"is left alone: {error}")
        except OSError as error:
            self._complain(path, f"cannot be written: {error.strerror or error}")
        else:
            return path
        return None

    def _complain(self, path: Path, what: str) -> None:
        if (message := f"tuning: {path} {what}") not in self._complained:
            self._complained.add(message)
            log.warning("%s", message)


class Logbook:
    """Writes down one run's tunings.

    Args:
        memory: where they are kept.
        fingerprint: what they are good for, from now on.
        untuned: what they are compared with.
    """

    def __init__(self, memory: Memory, fingerprint: Fingerprint, untuned: Setting) -> None:
        self._memory = memory
        self.fingerprint = fingerprint
        self._untuned = untuned
        #: of the tuning under way
        self._trials: list[Trial] = []

    def note(self, report: Report, *, more_trials: int) -> None:
        """Something happened; about `more_trials` will follow."""
        if isinstance(report, Trial):
            self._trials.append(report)
            if report.phase != "guard":
                self._tell(report, more_trials)
        elif isinstance(report, Adopted):
            self._note_adopted(report)
        elif report.retunes:
            log.info("tuning: %s: tuning again", report.what)
        else:
            log.info("tuning: %s; it was tuned shortly before, so not again yet", report.what)

    def _tell(self, trial: Trial, more_trials: int) -> None:
        untuned_ms, tried = self._trials[0].step_ms, len(self._trials) - 1
        if not tried:
            log.info("tuning: untuned, %s: %.1f ms", trial.setting, untuned_ms)
            return
        best_ms = min(each.step_ms for each in self._trials)
        log.info(
            "tuning: trial %d of about %d: %s: %.1f ms%s; best %.1f ms (%+.1f %%)",
            tried,
            tried + more_trials,
            trial.setting,
            trial.step_ms,
            ", cut short" if trial.cut else "",
            best_ms,
            100 * (best_ms / untuned_ms - 1),
        )

    def _note_adopted(self, adopted: Adopted) -> None:
        times_ms = {s: 1e3 * step_s for s, step_s in adopted.steps_s.items()}
        off_ms = [step_ms for s, step_ms in times_ms.items() if not s.enabled]
        done = TuningFile(
            self.fingerprint,
            self._untuned,
            adopted.setting,
            tuple(self._trials),
            adopted.steps,
            step_ms=times_ms.get(adopted.setting, math.nan),
            untuned_ms=times_ms.get(self._untuned, math.nan),
            off_ms=off_ms[0] if off_ms else math.nan,
        )
        self._trials.clear()
        path = self._memory.save(done)
        gain = f"{done.gain_pct:+.1f} % gained" if done.setting != done.untuned else "untuned"
        saved = f"; saved in {path}" if path is not None else ""
        log.info("tuning: done in %d steps: %s, %s%s", done.steps, done.setting, gain, saved)
        log.info("tuning: to fix it: %s", _paste(done.setting))

    def end(self) -> None:
        """Training is over; says what a tuning has found that came to no end."""
        tried = [trial for trial in self._trials if trial.phase != "guard" and trial.step_ms > 0]
        if len(tried) < 2:
            return
        best = min(tried, key=lambda trial: trial.step_ms)
        log.info(
            "tuning: the training ended first; fastest so far, not compared in turns yet: %s, "
            "%.1f ms (untuned %.1f ms); to fix it: %s",
            best.setting,
            best.step_ms,
            tried[0].step_ms,
            _paste(best.setting),
        )


def _paste(setting: Setting) -> str:
    """A setting as a line for the command line."""
    if not setting.enabled:
        return "BYTESCHED_ENABLED=0"
    partition_bytes, credit_bytes = setting.partition_bytes, setting.credit_bytes
    return f"BYTESCHED_PARTITION_BYTES={partition_bytes} BYTESCHED_CREDIT_BYTES={credit_bytes}"
