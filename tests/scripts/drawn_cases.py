"""What ranks do with a plan: train it plain and wrapped, and end at a moment that was drawn."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from drawn_plans import Plan
from drawn_training import At, Skipped, nothing_happens, train
from torch import Tensor, nn
from training import Job, differences

from bytesched.errors import BytesschedError, in_one_line

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
    """In fresh processes: a script that catches nothing; prints what became of it."""
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
