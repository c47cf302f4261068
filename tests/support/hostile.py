"""What a drawn training is, what becomes of its ranks, and what is wrong with how they fared."""

from __future__ import annotations

import random
from typing import Any

from drawn_cases import CODES, Fate, Seen
from drawn_optimizers import UNKNOWN, VOUCHED
from drawn_plans import LOOPS, MOMENTS, Plan
from ranks import ExitedRank
from scripts_optimizers import SPLITTABLE

#: of every wait of ours; ranks that end are heard of long before
TIMEOUT_S = 15.0

#: fields of Config, by mode
MODES: dict[str, dict[str, Any]] = {
    "wrap": {},
    "whole": {"split": "off"},
    "shard": {"shard": True},
    "barrier": {"cross_barrier": False},
}
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


#: what says that another rank is gone: errors of ours, or what DDP exchanges by itself, which is
#: its buckets in the second forward pass, and used parameters
NAMED = ("PeerLost", "MismatchError", "_rebuild_buckets()", "find_unused_parameters=True")


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
        named = told[rank] or next((name for name in NAMED if name in end.stderr), "")
        if end.code not in (0, 1):
            return f"another rank ended with {end.code}", story
        if end.code == 1 and not named:
            return "another rank has no named error", story
        if end.code == 0 and fate.step < plan.rounds - 1:
            return "another rank saw nothing", story
        if "SchedulerTimeout" in named:
            return "found by the deadline alone", story
    return "named by all", ""
