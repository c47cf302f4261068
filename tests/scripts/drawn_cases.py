"""What ranks do with a plan: train it plain and wrapped, and end at a moment that was drawn.

And what is wrong with how they fared.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from drawn_plans import MOMENTS, Plan
from drawn_training import At, Skipped, nothing_happens, train
from torch import Tensor, nn
from training import Job, differences

from bytesched.errors import BytesschedError, in_one_line

if TYPE_CHECKING:
    from ranks import ExitedRank

#: how a rank ends, and with which exit code
CODES = {"exception": 1, "exit": 0, "os_exit": 3, "kill": -9}


class Fault(Exception):
    """Raised by the user's code."""


@dataclass(frozen=True)
class Fate:
    """What happens to a rank, in which round, and when in it."""

    rank: int
    step: int
    moment: str
    way: str

    def at(self) -> At:
        """Makes it happen on this rank."""
        if dist.get_rank() != self.rank:
            return nothing_happens

        def happen(*_: Tensor) -> None:
            print("reached", flush=True)
            if self.way == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.way == "os_exit":
                os._exit(CODES[self.way])
            if self.way == "exit":
                sys.exit(CODES[self.way])
            raise Skipped if self.way == "skip" else Fault

        def at(moment: str, step: int, model: nn.Module) -> None:
            if step == self.step and moment == self.moment:
                happen()
            elif step == self.step and (moment, self.moment) == ("forward", "backward"):
                # One of the front half: others may be unused.
                parameters = list(model.parameters())
                parameters[len(parameters) // 2 - 1].register_hook(happen)

        return at


@dataclass(frozen=True)
class Seen:
    """Of one rank: where the wrapped run differs from the plain one, and what each raised."""

    differs: list[str] = field(default_factory=list)
    #: by plain training: the plan asks for what DDP does not do
    impossible: str = ""
    #: an error of ours, in one line
    raised: str = ""


def compared(plan: Plan, fate: Fate | None = None) -> Seen:
    """Plain and wrapped training; `fate` skips a part of a round in both."""
    plain = Job(wrapped=False)
    try:
        train(plain, plan, fate.at() if fate else nothing_happens)
    except Exception as error:  # noqa: BLE001 - DDP's or torch's
        return Seen(impossible=in_one_line(error))
    dist.barrier()
    wrapped = Job(wrapped=True, **plan.options)
    raised = ""
    try:
        train(wrapped, plan, fate.at() if fate else nothing_happens)
    except BytesschedError as error:
        raised = in_one_line(error)
    try:
        wrapped.close()
    except BytesschedError as error:
        raised = raised or in_one_line(error)
    if raised:
        return Seen(raised=raised)
    names, got_names = ([name for name, _ in job.records] for job in (plain, wrapped))
    found = list(differences(names, got_names, "recorded"))
    for (name, expected), (_, got) in zip(plain.records, wrapped.records, strict=False):
        found += differences(expected, got, name, plan.rtol(name))
    return Seen(found[:5])


def ended(plan_fields: dict[str, Any], fate_fields: dict[str, Any]) -> None:
    plan, fate = Plan(**plan_fields), Fate(**fate_fields)
    job = Job(wrapped=True, **plan.options)
    try:
        train(job, plan, fate.at())
    except BytesschedError as error:
        print("raised", in_one_line(error), flush=True)
        raise
    print("finished", flush=True)


def survived(plan: Plan, fate: Fate) -> str:
    """What this rank raised in a script that catches it, and goes on without us."""
    job = Job(wrapped=True, **plan.options)
    raised = ""
    try:
        train(job, plan, fate.at())
    except (BytesschedError, Fault) as error:
        raised = type(error).__name__
    with contextlib.suppress(BytesschedError):
        job.close()
    dist.barrier()
    return raised


# -- what becomes of ranks -----------------------------------------------------------------

#: what refuses a use; others say that something went wrong
REFUSALS = ("PluginError", "UnusedParameterError", "ConfigError", "MismatchError")


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
