"""Random turns on two to four ranks, one after the other, until a time is up: see scripts/soak."""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import drawn_cases
import ends_cases
import scripts_hostile
import soak_cases as cases
from hostile import plan_of, verdict_of
from ranks import RankFailure, Ranks, address_of, run_fresh
from scripts_optimizers import SPLITTABLE

#: after so many turns all that is made once per process is there
_SETTLED = 8
#: growth of one rank, from the end of the first quarter on, that is none
_GROWTH_KIB = 16 * 1024
#: a turn takes seconds: one that takes longer than this hangs, however busy the machine is
_HANGS_S = 300.0

#: what nothing says where all went well
_COMPLAINS = re.compile(r"Traceback|Fatal|Error|could not|ends before|not closed")

#: how often each kind of turn is drawn
_KINDS = {
    "script": 5,
    "wander": 5,
    "hostile": 3,
    "drawn": 3,
    "faulty": 2,
    "ended": 0.5,
    "killed": 0.1,
}


@dataclass
class Soak:
    """The turns of one seed, and what they have found."""

    ranks: Ranks
    seed: int
    #: how often each kind of turn is drawn
    kinds: dict[str, float] = field(default_factory=lambda: dict(_KINDS))
    failures: list[str] = field(default_factory=list)
    turns: Counter[str] = field(default_factory=Counter)
    #: of each rank after every turn: threads, descriptors, resident KiB
    left: list[list[tuple[int, int, int]]] = field(default_factory=list)

    def turn(self, number: int) -> str:
        """Runs a turn and looks at what it has left; what it was, in one line."""
        draw = random.Random(f"{self.seed} {number}")
        kind = draw.choices(list(self.kinds), list(self.kinds.values()))[0]
        self.turns[kind] += 1
        run: Callable[[random.Random, str], str] = getattr(self, f"_{kind}")
        try:
            what = run(draw, f"{self.seed}.{number}")
            self.left.append(self.ranks.run(cases.left))
        except RankFailure as failure:
            self.failures.append(f"{number} {kind} {failure}")
            self.left.clear()  # the next turn has new processes
            return f"{number} {kind}"
        return f"{number} {kind} {what} left {self.left[-1]}"

    def _script(self, draw: random.Random, seed: str) -> str:
        name = draw.choice(sorted(cases.scripts()))
        options = _settings(draw, self.ranks.world_size)
        self._compare(cases.scripts()[name], (), options, f"{name} {options}")
        return f"{name} {options}"

    def _wander(self, draw: random.Random, seed: str) -> str:
        options = _settings(draw, self.ranks.world_size)
        self._compare(cases.wander, (seed,), options, f"{seed} {options}")
        return str(options)

    def _hostile(self, draw: random.Random, seed: str) -> str:
        options = _settings(draw, self.ranks.world_size, tuned=False)
        sharded = draw.random() < 0.3
        if sharded:
            options |= {"shard": True, "split": "auto"}
        self._compare(scripts_hostile.hostile, (seed, sharded), options, f"{seed} {options}")
        return str(options)

    def _drawn(self, draw: random.Random, seed: str) -> str:
        plan = replace(plan_of(draw, seed, "compared"), world_size=self.ranks.world_size)
        # What may be refused leaves ranks that wait for each other.
        known = draw.choices(sorted(SPLITTABLE), k=len(plan.optimizers))
        loop = "one" if plan.loop == "joint" else plan.loop
        options = plan.options | {"shard": False}
        plan = replace(plan, optimizers=tuple(known), loop=loop, options=options)
        seen = self.ranks.run(drawn_cases.compared, plan, timeout_s=_HANGS_S)
        verdict, wrong = verdict_of(seen, plan, None)
        if wrong or verdict.startswith("refused"):
            self.failures.append(f"{plan}: {seen}")
        return f"{plan}: {verdict}"

    def _compare(
        self, script: Callable[..., None], args: tuple[Any, ...], options: Any, what: str
    ) -> None:
        for rank, found in enumerate(
            self.ranks.run(cases.same, address_of(script), args, options, timeout_s=_HANGS_S)
        ):
            if found:
                self.failures.append(f"{what}: rank {rank}: {found[:5]}")

    def _faulty(self, draw: random.Random, seed: str) -> str:
        fault, options = self._fault(draw), _settings(draw, self.ranks.world_size, tuned=False)
        raised = self.ranks.run(cases.faulty, seed, fault, options, timeout_s=_HANGS_S)
        if any(raised) and raised[fault[0]] != "Fault":
            self.failures.append(f"{seed} {fault} {options}: {raised}")
        return f"{fault} {options}: {raised}"

    def _killed(self, draw: random.Random, seed: str) -> str:
        fault, options = self._fault(draw), _settings(draw, self.ranks.world_size, tuned=False)
        ended = run_fresh(
            cases.killed, self.ranks.world_size, args=(seed, fault, options), timeout_s=_HANGS_S
        )
        others = [end for rank, end in enumerate(ended) if rank != fault[0]]
        said = [end.stdout.strip() for end in others]
        codes = [end.code for end in ended]
        reached = codes[fault[0]] == -9
        silent = not reached and any("nothing" not in words for words in said)
        if any(end.code != 0 for end in others) or silent:
            self.failures.append(f"{seed} {fault} {options}: {codes} {said}\n{others}")
        return f"{fault} {options}: {codes} {said}"

    def _fault(self, draw: random.Random) -> tuple[int, int, str]:
        rank = draw.randrange(self.ranks.world_size)
        return rank, draw.randrange(6), draw.choice(cases.MOMENTS)

    def _ended(self, draw: random.Random, seed: str) -> str:
        world_size = draw.choice((2, 2, 3, 4))
        options = _settings(draw, world_size, tuned=False)
        if draw.random() < 0.4:
            options |= {"shard": True, "split": "auto"}
        ended = run_fresh(
            ends_cases.ends_well, world_size, args=(seed, options), timeout_s=_HANGS_S
        )
        is_well = all(end.code == 0 and not _COMPLAINS.search(end.stderr) for end in ended)
        if not is_well or len({end.stdout for end in ended}) > 1:
            self.failures.append(f"{seed} {options}: {ended}")
        return f"{world_size} ranks, {options}, {max(end.seconds for end in ended):.1f} s"

    def leaks(self) -> list[str]:
        """What has grown from turn to turn."""
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
        """Figures, in a few lines."""
        lines = [", ".join(f"{count} {kind}" for kind, count in sorted(self.turns.items()))]
        if not self.left:
            return lines[0]
        for rank, (first, last) in enumerate(
            zip(self.left[min(_SETTLED, len(self.left) - 1)], self.left[-1], strict=True)
        ):
            lines.append(
                f"rank {rank}: threads {first[0]} -> {last[0]}, descriptors {first[1]} -> "
                f"{last[1]}, resident {first[2] // 1024} -> {last[2] // 1024} MiB"
            )
        return "\n".join(lines)


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
    parser.add_argument("--kind", choices=sorted(_KINDS), help="only turns of this kind")
    parser.add_argument("--turn", type=int, default=None, help="only this one")
    parser.add_argument(
        "--ranks", type=int, default=2, choices=(2, 3, 4), help="of turns that draw no number"
    )
    options = parser.parse_args(argv)
    seed = random.randrange(1 << 30) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    kinds = {options.kind: 1.0} if options.kind else _KINDS
    soak = Soak(Ranks(options.ranks), seed, kinds)
    number, until_s = options.turn or 0, time.monotonic() + 60 * options.minutes
    while True:
        seen = len(soak.failures)
        print(soak.turn(number), flush=True)
        for failure in soak.failures[seen:]:
            print(f"FAILED {failure}", flush=True)
        number += 1
        if options.turn is not None or time.monotonic() > until_s:
            break
    soak.ranks.close()
    found = soak.failures + soak.leaks()
    print(soak.report())
    print("\n".join(found) or "nothing found")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
