"""Runs fault scenarios: groups of fresh ranks that end as processes do, a few at a time."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rank_worker import Launch, resolve
from ranks import address_of, fork_server, new_store

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
class RankEnd:
    """How one rank ended, and what it told on the way."""

    #: exit code, negative for a signal
    code: int
    #: it did not end by itself, although it was not stopped
    hung: bool
    #: it was found stopped (SIGSTOP) when all other ranks had ended
    stopped: bool
    #: what it passed to `tell`
    told: Mapping[str, Any]
    stderr: str
    #: the text of its trace file, None if there is none
    trace: str | None


def tell(**facts: object) -> None:
    """Leave facts for the test, at once: the next instruction may be the last."""
    os.write(1, (json.dumps(facts) + "\n").encode())


def folder() -> Path:
    """A folder shared by the ranks of this scenario."""
    return Path(os.environ["FAULTS_FOLDER"])


def run_case(address: tuple[str, str], *args: object) -> None:
    """In a rank: run the case at `address`."""
    resolve(address)(*args)


class _Group:
    """The running ranks of one scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self._folder = tempfile.TemporaryDirectory(prefix="faults-")
        self._store = new_store()
        self._began = time.monotonic()
        self._codes: dict[int, int] = {}
        self._stopped: set[int] = set()
        self._hung: set[int] = set()
        self._running = {
            rank: fork_server().start(self._launch(rank)) for rank in range(scenario.world_size)
        }

    def _launch(self, rank: int) -> Launch:
        return Launch(
            rank=rank,
            world_size=self.scenario.world_size,
            store_port=self._store.port,
            # No wait of the scenario ends by this one.
            timeout_s=5 * HARD_LIMIT_S,
            output=self._output(rank),
            import_path=sys.path,
            environment={
                "FAULTS_FOLDER": self._folder.name,
                **self.scenario.environment.get(rank, {}),
            },
            case=address_of(run_case),
            args=(address_of(self.scenario.case), *self.scenario.args),
        )

    def _output(self, rank: int) -> str:
        return f"{self._folder.name}/rank{rank}"

    def poll(self) -> bool:
        """True once every rank has ended."""
        for rank, pid in list(self._running.items()):
            code = fork_server().poll(pid)
            if code is not None:
                del self._running[rank]
                self._codes[rank] = code
        if self._running and all(map(is_stopped, self._running.values())):
            self._stopped |= self._running.keys()
            for pid in self._running.values():
                os.kill(pid, signal.SIGCONT if self.scenario.continues else signal.SIGKILL)
        elif self._running and time.monotonic() - self._began > HARD_LIMIT_S:
            self._end_hung()
        return not self._running

    @property
    def waits_for_a_stopped_rank(self) -> bool:
        """True while the others can only run into their timeout."""
        return any(map(is_stopped, self._running.values()))

    def _end_hung(self) -> None:
        self._hung |= self._running.keys()
        for pid in self._running.values():
            os.kill(pid, signal.SIGCONT)
            os.kill(pid, signal.SIGUSR1)
        # Their stacks are being written.
        time.sleep(0.3)
        fork_server().end(self._running)
        self._codes |= dict.fromkeys(self._running, -signal.SIGKILL)
        self._running = {}

    def ends(self) -> list[RankEnd]:
        """By rank; the files of the scenario are gone afterwards."""
        ends = [self._end(rank) for rank in sorted(self._codes)]
        self._folder.cleanup()
        return ends

    def close(self) -> None:
        """Ends what still runs."""
        fork_server().end(self._running)
        self._folder.cleanup()

    def _end(self, rank: int) -> RankEnd:
        told: dict[str, Any] = {}
        for line in Path(f"{self._output(rank)}.out").read_text(errors="replace").splitlines():
            told |= json.loads(line)
        trace = Path(self._folder.name) / f"rank{rank}.trace.json"
        return RankEnd(
            code=self._codes[rank],
            hung=rank in self._hung,
            stopped=rank in self._stopped,
            told=told,
            stderr=Path(f"{self._output(rank)}.err").read_text(errors="replace"),
            trace=trace.read_text() if trace.exists() else None,
        )


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
        """Ends what still runs."""
        for group in self._running:
            group.close()

    def _go_on(self) -> None:
        busy = sum(not group.waits_for_a_stopped_rank for group in self._running)
        if self._waiting and busy < BUSY_GROUPS and len(self._running) < GROUPS_AT_ONCE:
            self._running.append(_Group(self._waiting.pop(0)))
        for group in [group for group in self._running if group.poll()]:
            self._running.remove(group)
            self._ended[group.scenario.name] = group.ends()
        time.sleep(0.01)
