"""The tuner of a training run: what is measured goes in, rank 0's decision comes out."""

from __future__ import annotations

import importlib.util
import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

from bytesched.config import Config
from bytesched.errors import ConfigError
from bytesched.tunable import Decision, RunFacts, Setting, Steps
from bytesched.version import __version__

from .controller import Controller, Pace, Report
from .file import Fingerprint
from .memory import Logbook, Memory
from .search import Search
from .space import Given, Link, fit_probes, seed_bytes, seeded_space

log = logging.getLogger("bytesched")

_NEEDED = ("numpy", "sklearn")
_SEED = 0
#: a remembered setting that cuts a model into more would take hours for a step
_MOST_CHUNKS = 20_000
#: between two looks at whether another model is still being tuned
_WAIT_STEPS = 20


def find_tuner(config: Config) -> OnlineTuner | None:
    """The tuner that `config` asks for; None if it asks for none.

    Raises `ConfigError` if there would be nothing to tune, or what tuning needs is missing. Every
    rank asks, so that they fail together, before the first collective.
    """
    if not config.tune or not config.enabled:
        return None
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"tuning needs {', '.join(missing)}, not installed: pip install 'bytesched[tune]'"
        )
    return OnlineTuner(Given.of(config), steps=config.tune_steps, memory=Memory(config.tune_file))


class OnlineTuner:
    """Puts link, model, search, controller and memory together (see tunable.Tuner).

    Of several in one process, one at a time tries settings: a step of one model lasts until its
    next one, and the step of another model may lie in between.

    Args:
        given: what the user has set.
        memory: what is known, and where it is kept.
        steps: the most that one tuning takes.
        now_s: reads the time.
    """

    #: who tries settings now
    _at_work: ClassVar[OnlineTuner | None] = None

    def __init__(
        self,
        given: Given,
        *,
        memory: Memory,
        steps: int = 150,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._given = given
        self._memory = memory
        self._pace = Pace(budget=steps)
        self._now_s = now_s
        self._bytes_per_s = math.nan
        #: what is tried first
        self._first: list[Setting] = []
        #: the steps until the next decision are those of a setting that holds, and show nothing
        self._waits = False
        #: turns of its own, and those of the other when it was asked last
        self._turns, self._heard = 0, -1
        # - from the beginning on
        self._facts: RunFacts
        self._link: Link
        self._logbook: Logbook | None = None
        self._controller: Controller

    def begin(self, facts: RunFacts) -> Decision:
        """The first decision: what is known of this cluster, or the untuned setting."""
        self._facts = facts
        self._link = fit_probes(facts.probes)
        pace = replace(self._pace, first_drop=facts.first_steps, drop=facts.changed_steps)
        fingerprint = _fingerprint(facts, self._link)
        self._logbook = Logbook(self._memory, fingerprint, facts.untuned)
        known, known_step_s = self._known(fingerprint)
        self._controller = Controller(
            facts.untuned,
            can_switch_off=self._can_switch_off,
            search=self._search_from,
            now_s=self._now_s,
            pace=pace,
            report=self._reported,
            known=known,
            known_step_s=known_step_s,
        )
        return self._decision()

    def decide(self, steps: Steps) -> Decision:
        """The next decision."""
        self._bytes_per_s = steps.sent_bytes / steps.busy_s if steps.busy_s > 0 else math.nan
        if self._waits:
            return self._decision()
        self._controller.observe(steps.durations_s)
        return self._decision()

    def close(self) -> None:
        """Training is over."""
        self._let_go()
        if self._logbook is not None:
            self._logbook.end()

    def _decision(self) -> Decision:
        turn = self._controller.turn
        self._waits = turn.phase != "watch" and self._must_wait()
        if self._waits:
            return Decision(self._controller.adopted or self._facts.untuned, _WAIT_STEPS)
        if turn.phase == "watch":
            self._let_go()
        else:
            OnlineTuner._at_work = self
        self._turns += 1
        return Decision(turn.setting, turn.steps)

    def _must_wait(self) -> bool:
        """Whether another one is at work, and has not stopped in the middle."""
        other = OnlineTuner._at_work
        if other is None or other is self:
            return False
        heard, self._heard = self._heard, other._turns
        return heard != self._heard

    def _let_go(self) -> None:
        if OnlineTuner._at_work is self:
            OnlineTuner._at_work = None

    def _known(self, fingerprint: Fingerprint) -> tuple[Setting | None, float]:
        """The setting to begin and stay with, if this case is known or leaves no choice.

        And what a step took under it, NaN if it was never measured.
        """
        same = self._memory.find(fingerprint)
        if same is not None:
            setting, day = same.setting, same.saved_at[:10]
            chunks = self._facts.model_bytes // setting.partition_bytes
            if chunks > _MOST_CHUNKS and not self._given.partition_bytes:
                why = f"it would cut this model into {chunks} chunks"
                log.warning("tuning: %s, remembered on %s, is ignored: %s", setting, day, why)
            elif self._given.allow(setting) and (setting.enabled or self._can_switch_off):
                log.info("tuning: known cluster, tuned %s: %s", day, setting)
                return setting, same.step_ms / 1e3
            else:
                self._first.append(setting)
        space = seeded_space(self._given, self._facts, self._link)
        one_chunk = self._facts.model_bytes <= space.low_bytes
        if one_chunk or len(space) == 1:
            why = "the model is one chunk, whatever the sizes" if one_chunk else repr(space)
            log.info("tuning: %s: nothing to tune", why)
            return self._facts.untuned, math.nan
        log.info("tuning: at most %d steps; the link has %s", self._pace.budget, self._link)
        return None, math.nan

    @property
    def _can_switch_off(self) -> bool:
        return "enabled" in self._facts.knobs

    def _search_from(self, adopted: Setting | None) -> Search:
        """The search, now that the baseline is measured."""
        link = self._link
        if adopted is not None and self._bytes_per_s > 0:
            # Something has drifted since the link was probed.
            link = replace(link, bytes_per_s=self._bytes_per_s)
            assert self._logbook is not None
            self._logbook.fingerprint = _fingerprint(self._facts, link)
        space = seeded_space(self._given, self._facts, link)
        seed = max(seed_bytes(self._facts, link), space.settings[0].partition_bytes)
        wanted = replace(space.settings[0], partition_bytes=seed, credit_bytes=2 * seed)
        first = [*([adopted] if adopted is not None else []), *self._first, space.nearest(wanted)]
        log.info("tuning: %r", space)
        return Search(space, seed=_SEED, first=first)

    def _reported(self, report: Report) -> None:
        assert self._logbook is not None
        self._logbook.note(report, more_trials=self._controller.more_trials)


def _fingerprint(facts: RunFacts, link: Link) -> Fingerprint:
    return Fingerprint(
        backend=facts.backend,
        ranks_per_host=facts.ranks_per_host,
        device=facts.device,
        framework=facts.framework,
        version=__version__,
        signature=facts.signature,
        model_bytes=facts.model_bytes,
        bytes_per_s=float(f"{link.bytes_per_s:.1e}"),
        overhead_s=float(f"{link.overhead_s:.1e}"),
    )
