"""One rank of the demo: trains a character GPT on the sources of the standard library.

Reports to the demo in lines of JSON on standard output, from rank 0.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import bytesched
from bytesched.records import from_json

from ..bench.rank import leave_after
from ..bench.systems.data_parallel import set_up
from ..bench.workloads.models import GPT, NextToken
from .ddp_trace import trace_ddp
from .specification import DemoSpecification, Trained

LossOf = Callable[[nn.Module, int], Tensor]


LENGTH = 64
TEXT_BYTES = 4 << 20
TURN_STEPS = 10
TRACED_STEPS = 8
LARGEST_BATCH = 64
PROBE_BATCH = 4


class Trainer:
    """One way to train the model, with a copy of its own."""

    def __init__(self, run: Trained, model: nn.Module, loss_of: LossOf) -> None:
        self.run = run
        self.running = set_up(run.kind, run.options, copy.deepcopy(model), "adamw")
        self.loss_of = loss_of
        self.losses: list[float] = []
        self.times_ms: list[float] = []

    def train(self, steps: int) -> None:
        """Go on for some steps; times run from the start of one to the start of the next.

        The first step finds an idle link and the last leaves one behind, so neither is counted.
        """
        starts_s = []
        for _ in range(steps):
            starts_s.append(time.perf_counter())
            self.running.optimizer.zero_grad()
            loss = self.loss_of(self.running.module, len(self.losses))
            loss.backward()
            self.running.optimizer.step()
            self.losses.append(loss.item())
        bytesched.flush()
        self.times_ms += [1e3 * (after - before) for before, after in pairwise(starts_s[1:])]

    def report(self) -> dict[str, float]:
        """How it goes, over the last turn."""
        return {
            "ms": statistics.median(self.times_ms[2 - TURN_STEPS :]),
            "loss": statistics.fmean(self.losses[-TURN_STEPS:]),
        }


def main(argv: list[str]) -> int:
    """Train what the specification, a JSON argument, asks for."""
    spec = from_json(DemoSpecification, argv[0])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    torch.manual_seed(1)
    text = torch.frombuffer(bytearray(source_text()), dtype=torch.uint8).long()
    model = NextToken(GPT(256, LENGTH, width=192, depth=6, heads=4))
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    batch = choose_batch(copy.deepcopy(model), text, nbytes)
    tell({"batch": batch, "model_bytes": nbytes})

    def loss_of(module: nn.Module, step: int) -> Tensor:
        return module(sample(text, batch, step))  # type: ignore[no-any-return]

    trainers = [Trainer(run, model, loss_of) for run in spec.runs]
    deadline_s = time.monotonic() + spec.train_s
    step = 0
    while step < spec.steps and agreed(time.monotonic() < deadline_s):
        for trainer in trainers:
            trainer.train(TURN_STEPS)
        step += TURN_STEPS
        tell({"step": step, "runs": [trainer.report() for trainer in trainers]})
    for trainer in trainers:
        losses: list[object] = [None] * dist.get_world_size()
        dist.all_gather_object(losses, trainer.losses)
        tell({"times_ms": trainer.times_ms, "losses": losses, "stats": trainer.running.close()})
    for run in spec.runs:
        if run.trace_folder:
            trace(run, copy.deepcopy(model), loss_of)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def trace(run: Trained, model: nn.Module, loss_of: LossOf) -> None:
    """Some iterations from the start with a timeline, apart from those that are timed."""
    folder = run.trace_folder
    if run.kind == "bytesched":
        trainer = Trainer(replace(run, options=run.options | {"timeline": folder}), model, loss_of)
        trainer.train(2 * TRACED_STEPS)
        trainer.running.close()
        return
    running = set_up("ddp", run.options, model, "adamw")
    assert isinstance(running.module, DistributedDataParallel)
    trace_ddp(running.module, running.optimizer, loss_of, steps=TRACED_STEPS, folder=folder)


def agreed(condition: bool) -> bool:
    """What rank 0 finds."""
    flag = torch.tensor(condition)
    dist.broadcast(flag, 0)
    return bool(flag)


def choose_batch(model: nn.Module, text: Tensor, nbytes: int) -> int:
    """The batch whose computation takes about as long as sending the gradients."""
    buffer = torch.zeros(nbytes // 4)
    dist.all_reduce(buffer)
    sending_s, computing_s = [], []
    for step in range(4):
        dist.barrier()
        start_s = time.perf_counter()
        dist.all_reduce(buffer)
        sending_s.append(time.perf_counter() - start_s)
        start_s = time.perf_counter()
        model(sample(text, PROBE_BATCH, step)).backward()
        computing_s.append(time.perf_counter() - start_s)
    batch = torch.tensor(PROBE_BATCH * min(sending_s) / min(computing_s[1:]))
    dist.broadcast(batch, 0)
    return max(2, min(LARGEST_BATCH, round(batch.item())))


def sample(text: Tensor, batch: int, step: int) -> Tensor:
    """This rank's batch of that step: pieces of the text."""
    seed = step * dist.get_world_size() + dist.get_rank()
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - LENGTH - 1, (batch, 1), generator=generator)
    return text[starts + torch.arange(LENGTH + 1)]


def source_text() -> bytes:
    """The Python sources of this machine's standard library, up to some megabytes."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) > TEXT_BYTES:
            break
    return bytes(text)


def tell(message: dict[str, Any]) -> None:
    """Send one message to the demo."""
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    leave_after(main)
