"""Runs fault scenarios: groups of fresh ranks that end as processes do, a few at a time."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ranks import ExitedRank, Fresh

# Two cores: more groups at once would only slow each other down, unless they wait for a timeout.
BUSY_GROUPS = 2
GROUPS_AT_ONCE = 6
# What still runs then has hung: far above any timeout_s of a scenario.
HARD_LIMIT_S = 150.0


@dataclass(frozen=True)
class Scenario:
    """A case to run on every rank of a fresh group."""

    name: str
    case: Callable[..., object]
    args: tuple[object, ...] = ()
    #: variables of single ranks, by rank
    environment: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    world_size: int = 2
    #: a rank that is still stopped when all others have ended goes on, instead of being killed
    continues: bool = False


@dataclass(frozen=True)
class RankEnd(ExitedRank):
    """How one rank ended, and what it told on the way."""

    #: it did not end by itself, although it was not stopped
    hung: bool
    #: it was found stopped (SIGSTOP) when all other ranks had ended
    stopped: bool
    #: what it passed to `tell`
    told: Mapping[str, Any]
    #: the text of its trace file, None if there is none
    trace: str | None


def tell(**facts: object) -> None:
    """Leave facts for the test, at once: the next instruction may be the last."""
    os.write(1, (json.dumps(facts) + "\n").encode())


def folder() -> Path:
    """A folder shared by the ranks of this scenario."""
    return Path(os.environ["FRESH_FOLDER"])


class _Group(Fresh):
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self._stopped: set[int] = set()
        size, environment = scenario.world_size, scenario.environment
        # No wait of the scenario ends by the timeout of its process group.
        limit_s = 5 * HARD_LIMIT_S
        super().__init__(
            scenario.case, size, limit_s, lambda rank: environment.get(rank, {}), scenario.args
        )

    def poll(self) -> bool:
        if super().poll():
            return True
        if all(map(is_stopped, self.running.values())):
            self._stopped |= self.running.keys()
            for pid in self.running.values():
                os.kill(pid, signal.SIGCONT if self.scenario.continues else signal.SIGKILL)
        elif self.seconds > HARD_LIMIT_S:
            self.end_hung()
        return not self.running

    @property
    def waits_for_a_stopped_rank(self) -> bool:
        """True while the others can only run into their timeout."""
        return any(map(is_stopped, self.running.values()))

    def rank_ends(self) -> list[RankEnd]:
        found = []
        for rank, end in enumerate(self.ends()):
            told: dict[str, Any] = {}
            for line in end.stdout.splitlines():
                told |= json.loads(line)
            trace = self.folder / f"rank{rank}.trace.json"
            text = trace.read_text() if trace.exists() else None
            hung, stopped = rank in self.hung, rank in self._stopped
            found.append(RankEnd(**vars(end), hung=hung, stopped=stopped, told=told, trace=text))
        return found


def is_stopped(pid: int) -> bool:
    """True if a signal has stopped that process."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    # The name in parentheses may hold anything; the state follows it.
    return status.rpartition(")")[2].split()[0] == "T"


class Runs:
    """Scenarios that run while the tests look at them, in the order given."""

    def __init__(self, scenarios: Iterable[Scenario]) -> None:
        self._waiting = list(scenarios)
        self._running: list[_Group] = []
        self._ended: dict[str, list[RankEnd]] = {}

    def of(self, scenario: Scenario) -> list[RankEnd]:
        """How its ranks ended, by rank."""
        while scenario.name not in self._ended:
            self._go_on()
        return self._ended[scenario.name]

    def close(self) -> None:
        for group in self._running:
            group.close()

    def _go_on(self) -> None:
        busy = sum(not group.waits_for_a_stopped_rank for group in self._running)
        if self._waiting and busy < BUSY_GROUPS and len(self._running) < GROUPS_AT_ONCE:
            self._running.append(_Group(self._waiting.pop(0)))
        for group in [group for group in self._running if group.poll()]:
            self._running.remove(group)
            self._ended[group.scenario.name] = group.rank_ends()
            group.close()
        time.sleep(0.01)
