"""The story of a tuning: told in the log as it happens, and kept in the memory."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

from bytesched.tunable import Setting

from .controller import Adopted, Drifted, Report
from .file import Fingerprint, Trial, TuningFile
from .memory import Memory

__all__ = ["Logbook"]

log = logging.getLogger("bytesched")


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
        if trial.phase == "guard":
            more_trials = 0
        else:
            self._tell(trial, more_trials)
        trials = tuple(self._trials)
        self._memory.save(replace(self._begun, trials=trials, steps=steps, more_trials=more_trials))

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
        gain = f"{done.gain_pct:+.1f} % gained" if adopted.setting != untuned else "untuned"
        saved = f"; saved in {path}" if path is not None else ""
        log.info("tuning: done in %d steps: %s, %s%s", adopted.steps, adopted.setting, gain, saved)
        log.info("tuning: to fix it: %s", done.paste())

    def _note_drift(self, drifted: Drifted) -> None:
        if drifted.retunes:
            self._begin()
            log.info("tuning: %s: tuning again", drifted.what)
        else:
            log.info("tuning: %s; it was tuned shortly before, so not again yet", drifted.what)
