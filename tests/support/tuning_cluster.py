"""A cluster that is a formula: real scheduler core, modelled link, noise as it is told."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from bytesched.bench.profile import Profile, load_profile
from bytesched.link import cluster as virtual
from bytesched.link.fabric import Fabric
from bytesched.link.sizes import Probe, probe_sizes
from bytesched.sim.systems import Costs, Model, buckets, scheduled
from bytesched.tunable import KNOBS, Decision, RunFacts, Setting, Steps, Tuner
from bytesched.tuning import space
from bytesched.tuning.controller import Controller, Turn
from bytesched.tuning.memory import Memory
from bytesched.tuning.online import OnlineTuner
from bytesched.tuning.search import Search
from bytesched.tuning.space import Given

OFF_MB = 25
UNTUNED = Setting(1 << 20, 2 << 20)


class BlindSearch(Search):
    """Any setting that was not tried, each as likely."""

    def _propose(self, untold: Sequence[Setting]) -> Setting | None:
        return self._random.choice(untold)


@lru_cache
def profile(name: str) -> Profile:
    return load_profile(name)


@dataclass(frozen=True)
class Link(space.Link):
    """What carries chunks here: each is across so much later than the next one may begin."""

    latency_s: float = 0.0


@lru_cache(maxsize=20000)
def exact_step_s(name: str, link: Link, setting: Setting) -> float:
    """A step without noise; with scheduling off, one as DDP has it, in buckets of 25 MB."""
    model = Model(profile(name), Costs(update_bytes_per_s=math.inf))
    fabric = Fabric(
        ranks=2,
        bytes_per_s=link.bytes_per_s,
        latency_s=link.overhead_s / 2,
        delay_s=link.latency_s,
        overlaps=False,
    )
    if setting.enabled:
        sizes = {name: str(getattr(setting, name)) for name in ("partition_bytes", "credit_bytes")}
        work = scheduled(model, fabric, sizes | {"policy": setting.policy})
    else:
        work = buckets(model, OFF_MB, are_views=True)
    cluster = virtual.Cluster(work, fabric)
    ended_s = [cluster.iterate() for _ in range(4)]
    return ended_s[-1] - ended_s[-2]


@dataclass
class Cluster:
    """Runs turns of a controller in virtual time."""

    model: str = "gpt"
    link: Link = field(default_factory=lambda: Link(4e-4, 118e6, 8e-4))
    #: of every step, as a share of it
    noise: float = 0.0
    #: share of the steps that take `late` times as long
    stragglers: float = 0.0
    late: float = 4.0
    #: every so many steps one takes `late` times as long; less than 1 is a short batch
    evaluated_every: int = 0
    seed: int = 0
    #: called before every step with its number; may change the link
    event: Callable[[Cluster, int], None] = lambda cluster, step: None
    now_s: float = 0.0
    steps: int = 0
    #: the settings of all steps, in order
    history: list[Setting] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def step_s(self, setting: Setting) -> float:
        """One more step."""
        self.event(self, self.steps)
        duration_s = exact_step_s(self.model, self.link, setting)
        duration_s *= 1 + self.noise * abs(self._random.gauss(0, 1))
        if self._random.random() < self.stragglers:
            duration_s *= self.late
        self.steps += 1
        if self.evaluated_every and self.steps % self.evaluated_every == 0:
            duration_s *= self.late
        self.history.append(setting)
        self.now_s += duration_s
        return duration_s

    def run(self, turn: Turn) -> tuple[float, ...]:
        return tuple(self.step_s(turn.setting) for _ in range(turn.steps))

    def drive(self, controller: Controller, steps: int) -> None:
        """So many steps, at least, in whole turns."""
        until = self.steps + steps
        while self.steps < until:
            controller.observe(self.run(controller.turn))

    def turns(self, tuner: Tuner, word: Decision) -> Iterator[Decision]:
        """The words of a tuner, each after its steps."""
        while True:
            durations_s = tuple(self.step_s(word.setting) for _ in range(word.next_in_steps))
            sent_bytes = len(durations_s) * profile(self.model).nbytes
            busy_s = sent_bytes / self.link.bytes_per_s
            word = tuner.decide(Steps(durations_s, busy_s, sent_bytes))
            yield word

    def best_step_s(self, settings: tuple[Setting, ...]) -> float:
        return min(exact_step_s(self.model, self.link, setting) for setting in settings)

    # -- what a session would have measured --------------------------------------------

    def probes(self) -> tuple[Probe, ...]:
        def measure(nbytes: int) -> Probe:
            seconds = max(
                self.link.seconds(nbytes), (self.link.seconds(nbytes) + self.link.latency_s) / 2
            )
            return Probe(nbytes, nbytes / seconds, 2e-4)

        return tuple(probe_sizes(measure))

    def facts(self, **changes: object) -> RunFacts:
        probes = self.probes()
        model_bytes = profile(self.model).nbytes
        facts: dict[str, object] = {
            "backend": "gloo",
            "ranks_per_host": (1, 1),
            "device": "cpu",
            "framework": "torch 2.13.0",
            "model_bytes": model_bytes,
            "signature": self.model,
            "probes": probes,
            "untuned": UNTUNED,
            "knobs": frozenset(KNOBS),
            "first_steps": 2,
            "changed_steps": 1,
        }
        return RunFacts(**(facts | changes))  # type: ignore[arg-type]


def tuner_on(cluster: Cluster, folder: Path, given: Given | None = None) -> OnlineTuner:
    return OnlineTuner(given or Given(), memory=Memory(folder=folder), now_s=lambda: cluster.now_s)


def train(cluster: Cluster, tuner: Tuner, steps: int, **facts: object) -> Decision:
    word = tuner.begin(cluster.facts(**facts))
    turns = cluster.turns(tuner, word)
    while cluster.steps < steps:
        word = next(turns)
    return word
