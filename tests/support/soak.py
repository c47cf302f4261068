"""Random turns on two to four ranks, one after the other, until a time is up: see scripts/soak.

Trainings are run plain and wrapped. A turn passes with equal bits, or with a named error on every
rank where it may be refused; a rank that ends is heard of by name, and nothing of it stays.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import drawn_cases
import soak_cases as cases
from drawn_cases import CODES, Fate, fate_of, verdict_of, verdict_of_ends
from drawn_plans import Plan, plan_of
from ranks import RankFailure, Ranks, address_of, run_fresh

#: after so many turns all that is made once per process is there
_SETTLED = 8
#: growth of one rank, from the end of the first quarter on, that is none
_GROWTH_KIB = 16 * 1024
#: a turn takes seconds: one that takes longer than this hangs, however busy the machine is
HANGS_S = 300.0

#: what nothing says where all went well
_COMPLAINS = re.compile(r"Traceback|Fatal|Error|could not|ends before|not closed")

#: how often each kind of turn is drawn: a script of the suite; a drawn training that is compared,
#: leaves out a step on one rank, or is ended on one; a good end
KINDS = {"script": 5, "compared": 8, "skipped": 1, "ended": 2, "well": 0.5}

#: how a turn went, and what is wrong with it; empty if nothing is
Verdict = tuple[str, str]


@dataclass
class Soak:
    seed: int
    #: of those turns that draw no number of ranks
    world_size: int = 2
    #: how often each kind of turn is drawn
    kinds: dict[str, float] = field(default_factory=lambda: dict(KINDS))
    failures: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    #: of each rank of a pool of `world_size` after every turn: threads, descriptors, resident KiB
    left: list[list[tuple[int, int, int]]] = field(default_factory=list)
    _pools: dict[int, Ranks] = field(default_factory=dict)

    def close(self) -> None:
        for ranks in self._pools.values():
            ranks.close()

    def turn(self, number: int) -> str:
        """Runs a turn and looks at what it has left; what it was and how it went, in one line."""
        draw = random.Random(f"{self.seed} {number}")
        kind = draw.choices(list(self.kinds), list(self.kinds.values()))[0]
        run: Callable[[random.Random, str], tuple[str, Verdict]] = getattr(self, f"_{kind}")
        try:
            what, (verdict, wrong) = run(draw, f"{self.seed}.{number}")
            if self.world_size in self._pools:
                self.left.append(self._pools[self.world_size].run(cases.left))
        except RankFailure as failure:
            what, verdict, wrong = "", "failed", str(failure)
            self.left.clear()  # the next turn has new processes
        self.counts[f"{kind}: {verdict}"] += 1
        if wrong:
            again = f"./scripts/soak --seed {self.seed} --turn {number} --ranks {self.world_size}"
            self.failures.append(f"{again}\n  {kind} {what}\n  {wrong}")
        left = f", left {self.left[-1]}" if self.left else ""
        return f"{number} {kind} {what}: {verdict}{left}"

    def _pool(self, world_size: int) -> Ranks:
        if world_size not in self._pools:
            self._pools[world_size] = Ranks(world_size)
        return self._pools[world_size]

    def _script(self, draw: random.Random, seed: str) -> tuple[str, Verdict]:
        name = draw.choice(sorted(cases.scripts()))
        options = _settings(draw, self.world_size)
        script = address_of(cases.scripts()[name])
        differs = self._pool(self.world_size).run(cases.same, script, options, timeout_s=HANGS_S)
        wrong = str([found[:5] for found in differs]) if any(differs) else ""
        return f"{name} {options}", ("differs" if wrong else "equal", wrong)

    def _compared(self, draw: random.Random, seed: str) -> tuple[str, Verdict]:
        plan = plan_of(draw, seed, "compared")
        return f"{plan}", self.compare(plan)

    def _skipped(self, draw: random.Random, seed: str) -> tuple[str, Verdict]:
        plan = plan_of(draw, seed, "skipped")
        fate = fate_of(draw, plan, "skip")
        return f"{plan} {fate}", self.compare(plan, fate)

    def _ended(self, draw: random.Random, seed: str) -> tuple[str, Verdict]:
        plan = plan_of(draw, seed, "ended")
        fate = fate_of(draw, plan, draw.choice(list(CODES)))
        return f"{plan} {fate}", end(plan, fate)

    def compare(self, plan: Plan, fate: Fate | None = None) -> Verdict:
        """How a plain and a wrapped training differ."""
        seen = self._pool(plan.world_size).run(drawn_cases.compared, plan, fate, timeout_s=HANGS_S)
        if any(rank.impossible or rank.raised for rank in seen):
            # A rank may hold what another one waits for.
            self._pools.pop(plan.world_size).close()
            self.left.clear()
        return verdict_of(seen, plan, fate)

    def _well(self, draw: random.Random, seed: str) -> tuple[str, Verdict]:
        world_size = draw.choice((2, 2, 3, 4))
        options = _settings(draw, world_size, tuned=False)
        if draw.random() < 0.4:
            options |= {"shard": True, "split": "auto"}
        ended = run_fresh(cases.ends_well, world_size, args=(seed, options), timeout_s=HANGS_S)
        is_well = all(end.code == 0 and not _COMPLAINS.search(end.stderr) for end in ended)
        is_equal = len({end.stdout for end in ended}) == 1
        wrong = "" if is_well and is_equal else f"{ended}"
        return f"{world_size} ranks, {options}", ("wrong" if wrong else "well", wrong)

    def leaks(self) -> list[str]:
        found: list[str] = []
        if len(self.left) <= _SETTLED:
            return found
        for rank in range(len(self.left[0])):
            threads, descriptors, resident = zip(
                *(turn[rank] for turn in self.left[_SETTLED:]), strict=True
            )
            for what, numbers in (("threads", threads), ("descriptors", descriptors)):
                if numbers[-1] > numbers[0]:
                    found.append(f"rank {rank}: {what} {numbers[0]} -> {numbers[-1]}")
            # It goes up and down with what a turn happened to draw.
            quarter = max(1, len(resident) // 4)
            growth = min(resident[-quarter:]) - max(resident[: 2 * quarter])
            if growth > _GROWTH_KIB:
                found.append(f"rank {rank}: {growth} KiB more")
        return found

    def report(self) -> str:
        lines = [f"{count} {verdict}" for verdict, count in sorted(self.counts.items())]
        if not self.left:
            return "\n".join(lines)
        for rank, (first, last) in enumerate(
            zip(self.left[min(_SETTLED, len(self.left) - 1)], self.left[-1], strict=True)
        ):
            lines.append(
                f"rank {rank}: threads {first[0]} -> {last[0]}, descriptors {first[1]} -> "
                f"{last[1]}, resident {first[2] // 1024} -> {last[2] // 1024} MiB"
            )
        return "\n".join(lines)


def end(plan: Plan, fate: Fate) -> Verdict:
    """How fresh processes end, of which one meets its fate."""
    args = asdict(plan), asdict(fate)
    ends = run_fresh(drawn_cases.ended, plan.world_size, timeout_s=HANGS_S, args=args)
    return verdict_of_ends(ends, plan, fate)


def _settings(draw: random.Random, ranks: int, *, tuned: bool = True) -> dict[str, Any]:
    partition_bytes = draw.choice((0, 256, 1000, 4096, 1 << 16))
    settings = {
        "partition_bytes": partition_bytes,
        "credit_bytes": draw.choice((0, 1, 2, 8)) * (partition_bytes or 1 << 16),
        "policy": draw.choice(("priority", "fifo")),
        "split": draw.choice(("off", "off", "auto", "on" if ranks == 2 else "auto")),
        "cross_barrier": draw.random() < 0.9,
    }
    if tuned and draw.random() < 0.2:
        settings |= {"restless": True, "split": "off"}
    return settings


def main(argv: list[str]) -> int:
    """Runs turns for some minutes; 1 if one of them found anything."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None, help="of all turns; drawn if not given")
    parser.add_argument("--kind", choices=sorted(KINDS), help="only turns of this kind")
    parser.add_argument("--turn", type=int, default=None, help="only this one")
    parser.add_argument(
        "--ranks", type=int, default=2, choices=(2, 3, 4), help="of turns that draw no number"
    )
    options = parser.parse_args(argv)
    seed = random.randrange(1 << 30) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    soak = Soak(seed, options.ranks, {options.kind: 1.0} if options.kind else KINDS)
    number, until_s = options.turn or 0, time.monotonic() + 60 * options.minutes
    while True:
        seen = len(soak.failures)
        print(soak.turn(number), flush=True)
        for failure in soak.failures[seen:]:
            print(f"FAILED {failure}", flush=True)
        number += 1
        if options.turn is not None or time.monotonic() > until_s:
            break
    soak.close()
    found = soak.failures + soak.leaks()
    print(soak.report())
    print("\n".join(found) or "nothing found")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
