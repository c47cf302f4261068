"""Trains under Horovod's timeline, and reads the order of its operations from the file."""

from __future__ import annotations

import itertools
import json
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.torch as hvd
from horovod_training import HorovodJob
from torch import nn
from training import mlp, sgd

from bytesched.plugins.planned.hooked_session import HookedSession
from bytesched.plugins.registry import session_of

STEPS = 8


#: of chunks, from these steps on: Horovod remembers the one, and is to keep to the other
ORDERS: dict[int, Callable[[int], list[int]]] = {
    4: lambda count: [*range(0, count, 2), *range(1, count, 2)],
    STEPS - 2: lambda count: list(range(count))[::-1],
}


def planning_of(model: nn.Module) -> Any:
    session = session_of(model)
    assert isinstance(session, HookedSession)
    return session.planning


def train_in_phases() -> None:
    """In the last step of each phase rank 1 begins backward when rank 0 is through with it."""
    for is_wrapped in (False, True):
        job = HorovodJob(wrapped=is_wrapped, partition_bytes=256)
        model = mlp()
        names = [(f"plain.{name}", p) for name, p in model.named_parameters()]
        optimizer = job.wrap(sgd(model), model, names=names)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = model(job.inputs(step)).square().mean()
            if is_wrapped and step in ORDERS:
                planning = planning_of(model)
                planning.order = ORDERS[step](len(planning._chunks))
            if step == STEPS - 1 and job.rank == 1:
                hvd.barrier()
            loss.backward()
            if step == STEPS - 1 and job.rank == 0:
                hvd.barrier()
            optimizer.step()
        job.close()
    hvd.stop_timeline()


class HorovodTimeline:
    """What Horovod did, from the file it wrote; the file has to mark the cycles."""

    def __init__(self, path: Path) -> None:
        text = path.read_text().rstrip().rstrip(",")
        events = json.loads(text if text.endswith("]") else text + "]")
        names: dict[int, str] = {}
        cycle = 0
        #: (what, tensor, cycle), in order
        self._began: list[tuple[str, str, int]] = []
        for event in events:
            if event.get("name") == "process_name" and event["pid"]:
                names[event["pid"]] = event["args"]["name"].removeprefix("allreduce.")
            elif event.get("name") == "CYCLE_START":
                cycle += 1
            elif event["ph"] == "B":
                self._began.append((event["name"], names[event["pid"]], cycle))

    def last_step(self, prefix: str) -> list[list[str]]:
        """Names that begin with `prefix`, as they were last reduced, by cycle."""
        reduced = [
            (name, cycle)
            for what, name, cycle in self._began
            if what == "ALLREDUCE" and name.startswith(prefix)
        ]
        last: list[tuple[str, int]] = []
        for name, cycle in reversed(reduced):
            if name in (later for later, _ in last):
                break
            last.insert(0, (name, cycle))
        return [
            [name for name, _ in group]
            for _, group in itertools.groupby(last, key=operator.itemgetter(1))
        ]

    def copies(self, prefix: str) -> int:
        """How often a tensor was copied into the fusion buffer, beside others."""
        return sum(
            what == "MEMCPY_IN_FUSION_BUFFER" and name.startswith(prefix)
            for what, name, _ in self._began
        )
