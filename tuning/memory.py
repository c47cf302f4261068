"""What a tuning finds: told in the log, and kept in a file per cluster and model, found again.

Nothing here ends a training: what cannot be read or written is named in a warning and left alone.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from bytesched.environment import user_cache_folder
from bytesched.files import locked, write_text
from bytesched.tunable import Setting

from .controller import Adopted, Drifted, Report
from .file import Fingerprint, Trial, TuningFile

log = logging.getLogger("bytesched")

_LOCK_TIMEOUT_S = 10.0


def cache_folder() -> Path:
    """Where tunings lie if no file is named."""
    return user_cache_folder() / "bytesched" / "tuning"


class Memory:
    """What is known about clusters.

    Args:
        file: reads and writes this file only; empty: a folder with one per fingerprint.
        folder: that folder, if it is not the user's cache folder.
    """

    def __init__(self, file: str | Path = "", *, folder: Path | None = None) -> None:
        self._file = Path(file) if file else None
        self._folder = folder or (cache_folder() if self._file is None else Path())
        self._complained: set[str] = set()
        #: where tunings of this run belong: many files may have to be read to find that out
        self._places: dict[Fingerprint, Path] = {}

    def find(self, fingerprint: Fingerprint) -> TuningFile | None:
        """The tuning of this case, if it was finished.

        A link that measured otherwise may be the same one in a noisy moment: where none of the
        tunings of this case had a link like this one, it is that of the nearest rate.
        """
        done = [known for _, known in self.entries() if known.setting is not None]
        case = [known for known in done if known.fingerprint.is_same_case(fingerprint)]
        same = [known for known in case if known.fingerprint.is_same(fingerprint)]
        return max(same, key=lambda known: known.saved_at, default=None) or min(
            case, key=lambda known: known.fingerprint.ratio_of_rates(fingerprint), default=None
        )

    def entries(self) -> Iterator[tuple[Path, TuningFile]]:
        """Every file that can be read, and what is in it."""
        for path in self._paths():
            try:
                yield path, TuningFile.read(path)
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                self._complain(path, f"is ignored: {error}")

    def path_of(self, fingerprint: Fingerprint) -> Path:
        """Where a tuning of this case belongs."""
        if self._file is not None:
            return self._file
        if fingerprint not in self._places:
            rate = f"{fingerprint.bytes_per_s:.1e}".replace("+", "")
            new = self._folder / f"{fingerprint.name}-{rate}.json"
            same = [path for path, one in self.entries() if one.fingerprint.is_same(fingerprint)]
            self._places[fingerprint] = same[0] if same else new
        return self._places[fingerprint]

    def save(self, tuning: TuningFile) -> Path | None:
        """Writes a tuning in one piece; where it is now, or None if it could not be written.

        A finished tuning is not replaced by one that is still running, be it of another case.
        """
        try:
            path = self.path_of(tuning.fingerprint)
            path.parent.mkdir(parents=True, exist_ok=True)
            with locked(path.with_name(f".{path.name}.lock"), _LOCK_TIMEOUT_S):
                return path if self._write(path, tuning) else None
        except OSError as error:
            where = self._file or self._folder
            self._complain(where, f"cannot be written: {error.strerror or error}")
        return None

    def _write(self, path: Path, tuning: TuningFile) -> bool:
        try:
            known = TuningFile.read(path)
        except FileNotFoundError:
            pass
        except ValueError as error:
            if self._file is not None:
                # Whatever it is, the user named it and would miss it.
                self._complain(path, f"is left alone: {error}")
                return False
        else:
            if known.setting is not None and tuning.setting is None:
                return True
        now = datetime.now(timezone.utc).isoformat(timespec="microseconds")
        content = json.dumps(replace(tuning, saved_at=now).to_json(), indent=1)
        write_text(path, content + "\n", durable=True)
        return True

    def _paths(self) -> list[Path]:
        if self._file is not None:
            return [self._file]
        try:
            return sorted(self._folder.glob("*.json"))
        except OSError as error:
            self._complain(self._folder, f"cannot be read: {error.strerror or error}")
            return []

    def _complain(self, path: Path, what: str) -> None:
        if (message := f"tuning: {path} {what}") not in self._complained:
            self._complained.add(message)
            log.warning("%s", message)


class Logbook:
    """Writes down one run's tunings.

    Args:
        memory: where they are kept.
        fingerprint: what they are good for.
        untuned: what they are compared with.
    """

    def __init__(self, memory: Memory, fingerprint: Fingerprint, untuned: Setting) -> None:
        self._memory = memory
        self._begun = TuningFile(fingerprint, untuned, None, (), 0)
        self._begin()

    def moves_to(self, fingerprint: Fingerprint) -> None:
        """What is found from now on is good for `fingerprint`."""
        self._begun = replace(self._begun, fingerprint=fingerprint)

    def _begin(self) -> None:
        self._trials: list[Trial] = []
        self._is_done = False

    def note(self, report: Report, *, steps: int, more_trials: int) -> None:
        """Something happened after `steps` of this tuning; about `more_trials` will follow."""
        if isinstance(report, Trial):
            self._note_trial(report, steps, more_trials)
        elif isinstance(report, Adopted):
            self._note_adopted(report)
        else:
            self._note_drift(report)

    def _note_trial(self, trial: Trial, steps: int, more_trials: int) -> None:
        self._trials.append(trial)
        if trial.phase != "guard":
            self._tell(trial, more_trials)
        trials = tuple(self._trials)
        self._memory.save(replace(self._begun, trials=trials, steps=steps))

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
        untuned = self._begun.untuned
        times_ms = {s: 1e3 * step_s for s, step_s in adopted.steps_s.items()}
        off_ms = [step_ms for s, step_ms in times_ms.items() if not s.enabled]
        done = replace(
            self._begun,
            setting=adopted.setting,
            trials=tuple(self._trials),
            steps=adopted.steps,
            step_ms=times_ms.get(adopted.setting, math.nan),
            untuned_ms=times_ms.get(untuned, math.nan),
            off_ms=off_ms[0] if off_ms else math.nan,
        )
        path = self._memory.save(done)
        self._is_done = True
        gain = f"{done.gain_pct:+.1f} % gained" if adopted.setting != untuned else "untuned"
        saved = f"; saved in {path}" if path is not None else ""
        log.info("tuning: done in %d steps: %s, %s%s", adopted.steps, adopted.setting, gain, saved)
        log.info("tuning: to fix it: %s", done.paste())

    def end(self) -> None:
        """Training is over; says what a tuning has found that came to no end."""
        tried = [trial for trial in self._trials if trial.phase != "guard" and trial.step_ms > 0]
        if len(tried) < 2 or self._is_done:
            return
        best = min(tried, key=lambda trial: trial.step_ms)
        log.info(
            "tuning: the training ended first; fastest so far, not compared in turns yet: %s, "
            "%.1f ms (untuned %.1f ms); to fix it: %s",
            best.setting,
            best.step_ms,
            tried[0].step_ms,
            replace(self._begun, setting=best.setting).paste(),
        )

    def _note_drift(self, drifted: Drifted) -> None:
        if drifted.retunes:
            self._begin()
            log.info("tuning: %s: tuning again", drifted.what)
        else:
            log.info("tuning: %s; it was tuned shortly before, so not again yet", drifted.what)
