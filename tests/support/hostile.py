"""Hostile scripts that are drawn, one after the other, until a time is up: see scripts/hostile.

Each is trained plain and wrapped on two to four ranks. It passes with equal bits, or with a named
error on every rank where the plan may be refused. A rank that ends is heard of by name at once.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import drawn_cases as cases
from drawn_cases import CODES, Fate, Seen
from drawn_optimizers import UNKNOWN, VOUCHED
from drawn_plans import LOOPS, MOMENTS, Plan
from ranks import ExitedRank, RankFailure, Ranks, run_fresh
from scripts_optimizers import SPLITTABLE

#: of every wait of ours; ranks that end are heard of long before
TIMEOUT_S = 15.0
#: a turn takes a second or two: one that takes longer than this hangs, however busy the machine is
HANGS_S = 90.0

#: fields of Config, by mode
MODES: dict[str, dict[str, Any]] = {
    "wrap": {},
    "whole": {"split": "off"},
    "shard": {"shard": True},
    "barrier": {"cross_barrier": False},
}
#: how often each kind of turn is drawn
KINDS = {"compared": 5, "skipped": 1, "ended": 2}
#: what refuses a use; others say that something went wrong
REFUSALS = ("PluginError", "UnusedParameterError", "ConfigError", "MismatchError")


def plan_of(draw: random.Random, seed: str, kind: str) -> Plan:
    """What is trained in a turn of that kind."""
    mode = draw.choice(list(MODES))
    loop = draw.choices(list(LOOPS), list(LOOPS.values()))[0]
    if kind == "skipped" and loop == "gan":
        loop = "one"  # a rank that leaves out the rest would not train the generator, too
    count = {"several": draw.randint(2, 3), "two_models": 2, "gan": 2}.get(loop, 1)
    known = sorted(SPLITTABLE)
    names = [
        draw.choice(draw.choices((known, list(UNKNOWN), list(VOUCHED)), (4, 5, 1))[0])
        for _ in range(count)
    ]
    if loop == "gan" or kind != "compared":
        # It needs a closure.
        names = ["adamw" if name == "LBFGS" else name for name in names]
    partition_bytes = draw.choice((0, 256, 1000, 4096))
    options = {
        "partition_bytes": partition_bytes,
        "credit_bytes": draw.choice((0, 1, 2)) * (partition_bytes or 1 << 16),
        "policy": draw.choice(("priority", "fifo")),
        "timeout_s": TIMEOUT_S,
    }
    return Plan(
        seed,
        world_size=draw.choice((2, 2, 3, 4) if kind == "compared" else (2, 3, 4)),
        loop=loop,
        optimizers=tuple(names),
        options=options | MODES[mode],
        calm=kind != "compared",
    )


def fate_of(draw: random.Random, plan: Plan, way: str) -> Fate:
    """What happens to a rank that carries the plan out."""
    moments = [m for m in MOMENTS if plan.loop != "gan" or m != "accumulated"]
    if way == "skip":
        # A rank without its backward pass would leave plain ranks waiting for it.
        moments = ["before_step"]
    return Fate(
        draw.randrange(plan.world_size), draw.randrange(plan.rounds), draw.choice(moments), way
    )


@dataclass
class Hostile:
    """The turns of one seed, and what they have found."""

    seed: int
    failures: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    _pools: dict[int, Ranks] = field(default_factory=dict)

    def close(self) -> None:
        for ranks in self._pools.values():
            ranks.close()

    def turn(self, number: int) -> str:
        """Runs a turn; what it was and how it went, in one line."""
        draw = random.Random(f"{self.seed} {number}")
        kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
        plan = plan_of(draw, f"{self.seed}.{number}", kind)
        way = {"compared": "", "skipped": "skip"}.get(kind) or draw.choice(list(CODES))
        fate = None if kind == "compared" else fate_of(draw, plan, way)
        if kind == "ended":
            assert fate is not None
            verdict, wrong = self._ended(plan, fate)
        else:
            verdict, wrong = self._compared(plan, fate)
        self.counts[f"{kind}: {verdict}"] += 1
        what = f"{number} {kind} {plan}" + (f" {fate}" if fate else "")
        if wrong:
            again = f"./scripts/hostile --seed {self.seed} --turn {number}"
            self.failures.append(f"{again}\n  {what}\n  {wrong}")
        return f"{what}: {verdict}"

    def _compared(self, plan: Plan, fate: Fate | None) -> tuple[str, str]:
        if plan.world_size not in self._pools:
            self._pools[plan.world_size] = Ranks(plan.world_size)
        ranks = self._pools[plan.world_size]
        try:
            seen = ranks.run(cases.compared, plan, fate, timeout_s=HANGS_S)
        except RankFailure as failure:
            return "failed", str(failure)
        if any(rank.impossible or rank.raised for rank in seen):
            # A rank may hold what another one waits for.
            ranks.close()
            del self._pools[plan.world_size]
        return verdict_of(seen, plan, fate)

    def _ended(self, plan: Plan, fate: Fate) -> tuple[str, str]:
        ends = run_fresh(
            cases.ended, plan.world_size, timeout_s=HANGS_S, args=(asdict(plan), asdict(fate))
        )
        return verdict_of_ends(ends, plan, fate)


def verdict_of(seen: list[Seen], plan: Plan, fate: Fate | None) -> tuple[str, str]:
    """How ranks that compared fared, and what is wrong with it; empty if nothing is."""
    raised = [rank.raised for rank in seen]
    if any(rank.impossible for rank in seen):
        return "impossible", ""
    if not any(raised):
        differs = [rank.differs for rank in seen]
        return ("differs", f"{differs}") if any(differs) else ("equal", "")
    # Nobody waits for a rank that has nothing more to do.
    if not all(raised) and (fate is None or fate.step < plan.rounds - 1):
        return "raised on some ranks", f"{raised}"
    kinds = [line.partition(":")[0] for line in raised]
    if fate is not None and "SchedulerTimeout" in kinds:
        return "found by the deadline alone", f"{raised}"
    if fate is not None or any(kind in REFUSALS for kind in kinds):
        return f"refused, {next(filter(None, raised))[:150]}", ""
    return "raised", f"{raised}"


def verdict_of_ends(ends: list[ExitedRank], plan: Plan, fate: Fate) -> tuple[str, str]:
    """How the processes ended, and what is wrong with it; empty if nothing is."""
    story = "\n".join(f"  rank {rank}: {end}" for rank, end in enumerate(ends))
    told = [
        next((line for line in end.stdout.splitlines() if line.startswith("raised ")), "")
        for end in ends
    ]
    ender = ends[fate.rank]
    others = [rank for rank in range(plan.world_size) if rank != fate.rank]
    if "reached" not in ender.stdout:
        refused = all(any(kind in line for kind in REFUSALS) for line in told)
        return ("refused before", "") if refused else ("not reached", story)
    if ender.code != CODES[fate.way]:
        return f"the {fate.way} ended with {ender.code}", story
    for rank in others:
        end = ends[rank]
        named = told[rank] or next(
            (n for n in ("PeerLost", "MismatchError") if n in end.stderr), ""
        )
        if end.code not in (0, 1):
            return f"another rank ended with {end.code}", story
        if end.code == 1 and not named:
            return "another rank has no named error", story
        if end.code == 0 and fate.step < plan.rounds - 1:
            return "another rank saw nothing", story
        if "SchedulerTimeout" in named:
            return "found by the deadline alone", story
    return "named by all", ""


def main(argv: list[str]) -> int:
    """Runs turns for some minutes; 1 if one of them found anything."""
    parser = argparse.ArgumentParser(prog="hostile", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None, help="of all turns; drawn if not given")
    parser.add_argument("--turn", type=int, default=None, help="only this one")
    options = parser.parse_args(argv)
    seed = random.randrange(1 << 30) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    hostile = Hostile(seed)
    number, until_s = options.turn or 0, time.monotonic() + 60 * options.minutes
    while True:
        seen = len(hostile.failures)
        print(hostile.turn(number), flush=True)
        for failure in hostile.failures[seen:]:
            print(f"FAILED {failure}", flush=True)
        number += 1
        if options.turn is not None or time.monotonic() > until_s:
            break
    hostile.close()
    for verdict, count in sorted(hostile.counts.items()):
        print(f"{count} {verdict}")
    print(f"{hostile.counts.total()} turns, {len(hostile.failures)} failed")
    return 1 if hostile.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
