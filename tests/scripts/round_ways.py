"""Ways to train a script that show what DDP decides: small buckets, late ranks, held sums, turns.

Every rank is late now and then: what reads a gradient or a weight too early shall not be right by
chance. `held` makes sure of it: there a sum does not begin before somebody waits for it.
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from rank_worker import resolve
from torch import Tensor, nn
from training import Job, adamw, differences, listening, train

import bytesched
from bytesched.plugins.planned import guard as guards
from bytesched.plugins.planned.wire import GroupWire
from bytesched.verdict import Comparison, Verdict

#: about two layers: the scripts' models are three buckets or so
BUCKET_MB = 0.0006

PACKAGE = str(Path(bytesched.__file__).parent)
#: functions of ours in an iteration of DDP by itself, which see whether iterations have changed
CALLS_ASIDE = 30

#: of too few rounds, left to DDP from the start, or with a join(), after which there are none
WITHOUT_TURNS = {*("called_around", "forward_called", "hook_registered", "in_a_context", "joined")}


class RoundsJob(Job):
    """A job whose ranks come to each step when they like, and whose buckets are small."""

    views = False
    bucket_mb: float | None = BUCKET_MB

    def ddp(self, module: nn.Module, **arguments: Any) -> Any:
        usual = {"bucket_cap_mb": self.bucket_mb, "gradient_as_bucket_view": self.views}
        return super().ddp(module, **usual | arguments)

    def inputs(self, step: int, *shape: int) -> Tensor:
        time.sleep(0.004 * random.Random(f"{self.rank} {step}").random())
        return super().inputs(step, *shape)


class ViewsJob(RoundsJob):
    views = True


class HeldWork:
    """A collective that begins when somebody waits for it, after all that should have begun before.

    Args:
        begin: begins it.
        queue: those that have not begun, in the order in which they should have.
    """

    #: how many have, in this process
    begun = 0

    def __init__(self, begin: Callable[[], Any], queue: list[HeldWork]) -> None:
        self._begin = begin
        self._queue = queue
        self._work: Any = None
        self._ended: torch.futures.Future[None] = torch.futures.Future()
        queue.append(self)

    def wait(self, *limit: Any) -> None:
        while self._work is None:
            first = self._queue.pop(0)
            first._work = first._begin()
            HeldWork.begun += 1
        self._work.wait(*limit)
        if not self._ended.done():
            self._ended.set_result(None)

    def is_completed(self) -> bool:
        return self._ended.done()

    def get_future(self) -> torch.futures.Future[None]:
        return self._ended


@contextlib.contextmanager
def holding() -> Iterator[None]:
    """Inside, what is wrapped gets a wire on which nothing begins by itself."""
    make: Any = GroupWire.__init__

    def made(wire: Any, *args: Any) -> None:
        make(wire, *args)
        queue: list[HeldWork] = []
        starts = wire.start, wire.start_largest
        wire.start = lambda tensor, key="": HeldWork(partial(starts[0], tensor, key), queue)
        wire.start_largest = lambda tensor: HeldWork(partial(starts[1], tensor), queue)

    with mock.patch.object(GroupWire, "__init__", made):
        yield


def held(job: Job, script: tuple[str, str], *args: Any) -> None:
    """``script`` over such a wire."""
    with holding():
        resolve(script)(job, *args)


@contextlib.contextmanager
def deciding(verdict: Verdict, **rounds: int) -> Iterator[None]:
    """Inside, each comparison of a plan with DDP takes a few ``rounds`` and has this verdict."""
    with contextlib.ExitStack() as made:
        made.enter_context(mock.patch.object(Comparison, "verdict", return_value=verdict))
        for name, number in rounds.items():
            made.enter_context(mock.patch.object(guards, f"_{name}", number))
        yield


def taking_turns(job: Job, script: tuple[str, str], *args: Any) -> None:
    """``script`` with turns of three rounds or so: a plan and DDP by itself, all the time."""
    turns = 0
    begins = guards.Guard.plain_begins

    def plain_begins(guard: guards.Guard) -> None:
        nonlocal turns
        turns += 1
        begins(guard)

    few = {
        **{"SETTLED": 2, "SETTLED_AGAIN": 1, "SETTLED_PLAIN": 0},
        **{"COUNTED": 1, "COUNTED_FIRST": 1},
    }
    with (
        deciding(Verdict.OPEN, **few),
        mock.patch.object(guards.Guard, "plain_begins", plain_begins),
    ):
        resolve(script)(job, *args)
    assert turns or not job.wrapped or script[1] in WITHOUT_TURNS, "no turn was taken"


def decided(job: Job, verdict: str) -> None:
    """A turn of a few rounds that ends with ``verdict``, and what follows."""
    with deciding(Verdict[verdict], SETTLED=2, COUNTED_FIRST=2, SETTLED_PLAIN=1):
        model, optimizer = job.begin(adamw)
        train(job, model, optimizer, steps=16)
    job.record_state(model, optimizer)


def aside_and_back(job: Job) -> None:
    """DDP goes on by itself after a turn, and the plan comes back later.

    Meanwhile the script has kept some state of the optimizer, which has no hook of ours then.
    """
    few = {"SETTLED": 2, "COUNTED_FIRST": 2, "SETTLED_PLAIN": 1, "LASTS": 6, "ASKED_AFTER": 4}
    with deciding(Verdict.PLAIN, SETTLED_AGAIN=100, **few):
        model, optimizer = job.begin(adamw)
        #: whether it was deferred, in each step
        deferred: list[bool] = []
        kept: list[Tensor] = []
        calls: list[str] = []

        def called(frame: FrameType, event: str, _: object) -> None:
            code = frame.f_code
            if event == "call" and code.co_filename.startswith(PACKAGE):
                calls.append(code.co_name)

        def look(step: int) -> None:
            deferred.append(type(optimizer.state) is not defaultdict)
            assert deferred[-1] == bool(optimizer._optimizer_step_pre_hooks)
            if step == 9:
                sys.setprofile(called)
            if step == 10:
                sys.setprofile(None)
                assert len(calls) <= CALLS_ASIDE, calls
                assert not deferred[-1]
                kept.extend(state["exp_avg"] for state in optimizer.state.values())
            for index, average in enumerate(kept):
                job.record(f"kept {step} {index}", average)

        train(job, model, optimizer, steps=30, after_step=look)
    there = [is_there for is_there, _ in groupby(deferred)]
    assert there == ([True, False, True] if job.wrapped else [False])
    job.record_state(model, optimizer)


def decided_twice(guard: bool) -> tuple[list[str], int]:
    """Where two runs differ of which the plan wins one and DDP the other; how often that is said.

    Without a ``guard`` nobody wins.
    """
    one, other = list[Any](), list[Any]()
    with listening() as lines:
        for verdict, run in (("PLANNED", one), ("PLAIN", other)):
            with contextlib.closing(RoundsJob(wrapped=True, guard=guard, hierarchy="off")) as job:
                decided(job, verdict)
            run += [value for _, value in job.records]
    said = sum(" ms with plain DDP, " in line for line in lines)
    return list(differences(one, other, "recorded")), said


def in_buckets_of_ours(job: RoundsJob, script: tuple[str, str], *args: Any) -> None:
    """`held`, where the script leaves the size of buckets open."""
    job.bucket_mb = None
    held(job, script, *args)
