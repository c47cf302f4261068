"""One rank of the demo: trains a character GPT on the sources of the standard library."""

from __future__ import annotations

import copy
import statistics
import sysconfig
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

import bytesched
from bytesched.lab.ranks import Place
from bytesched.trace.timeline import Timeline

from ..bench.link import all_reduces_s
from ..bench.rank import Ranks, run_rank
from ..bench.systems.data_parallel import set_up
from ..bench.workloads.models import GPT
from . import OURS, PLAIN, RUNS, Demo

LossOf = Callable[[nn.Module, int], Tensor]

LENGTH = 64
TEXT_BYTES = 4 << 20
TURN_STEPS = 10
TRACED_STEPS = 8
LARGEST_BATCH = 64
PROBE_BATCH = 4
PROBES = 4


class Trainer:
    """One way to train the model, with a copy of its own."""

    def __init__(self, name: str, model: nn.Module, loss_of: LossOf, **options: str) -> None:
        kind, given = RUNS[name]
        self.running = set_up(kind, given | options, copy.deepcopy(model), "adamw")
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

    def __str__(self) -> str:
        """How the last turn went."""
        took_ms = statistics.median(self.times_ms[2 - TURN_STEPS :])
        return f"{took_ms:.0f} ms loss {statistics.fmean(self.losses[-TURN_STEPS:]):.4f}"


def measure(demo: Demo, _: Place) -> dict[str, Any]:
    """Losses and times of each way, after a turn of each in turn; and timelines of two."""
    ranks = Ranks()
    torch.manual_seed(1)
    text = torch.frombuffer(bytearray(source_text()), dtype=torch.uint8).long()
    model = GPT(256, LENGTH, width=192, depth=6, heads=4)
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    batch = choose_batch(copy.deepcopy(model), text, nbytes, ranks)
    ranks.say(
        f"{nbytes / 1e6:.1f} MB of gradients per iteration, batch of {batch} per host. "
        f"Turns of {TURN_STEPS} steps:\n"
    )

    def loss_of(module: nn.Module, step: int) -> Tensor:
        return module(sample(text, batch, step * ranks.size + ranks.rank))  # type: ignore[no-any-return]

    trainers = {name: Trainer(name, model, loss_of) for name in RUNS}
    deadline_s = time.monotonic() + demo.train_s
    step = 0
    while step < demo.steps and ranks.gather(time.monotonic() < deadline_s)[0]:
        for trainer in trainers.values():
            trainer.train(TURN_STEPS)
        step += TURN_STEPS
        ranks.say(f"{step:>4}  " + "  ".join(f"{name} {each!s}" for name, each in trainers.items()))
    found = {
        name: {"times_ms": each.times_ms, "losses": ranks.gather(each.losses)}
        for name, each in trainers.items()
    }
    for trainer in trainers.values():
        trainer.running.close()
    plain, ours = (str(Path(demo.folder, RUNS[name][0])) for name in (PLAIN, OURS))
    trace_ddp(Trainer(PLAIN, model, loss_of), Timeline(plain, rank=ranks.rank))
    traced = Trainer(OURS, model, loss_of, timeline=ours)
    traced.train(2 * TRACED_STEPS)
    traced.running.close()
    return found


def trace_ddp(trainer: Trainer, timeline: Timeline) -> None:
    """Trains with plain DDP, on the same tracks as bytesched's own, to lay the two side by side."""
    model, optimizer = trainer.running.module, trainer.running.optimizer
    assert isinstance(model, DistributedDataParallel)
    group = model.process_group
    computed_ns = 0

    def average(bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """As DDP does by itself."""
        start_ns, index = time.perf_counter_ns(), bucket.index()
        buffer = bucket.buffer().div_(group.size())

        def averaged(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            times_ns = start_ns, time.perf_counter_ns()
            timeline.on_span("send", f"bucket {index}", *times_ns, {"chunk": index})
            return future.value()[0]

        work = dist.all_reduce(buffer, group=group, async_op=True)
        return work.get_future().then(averaged)  # type: ignore[no-any-return]

    def gradient_ready(_: Tensor) -> None:
        nonlocal computed_ns
        computed_ns = time.perf_counter_ns()

    # DDP compares annotations of a hook, which are text here; a lambda has none.
    model.register_comm_hook(group, lambda _, bucket: average(bucket))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(gradient_ready)
    for step in range(TRACED_STEPS):
        optimizer.zero_grad()
        at_ns = [time.perf_counter_ns()]
        loss = trainer.loss_of(model, step)
        at_ns.append(time.perf_counter_ns())
        loss.backward()
        at_ns.append(time.perf_counter_ns())
        optimizer.step()
        at_ns.append(time.perf_counter_ns())
        timeline.on_span("wait", "end of backward", computed_ns, at_ns[2])
        for track, span_ns in zip(("forward", "backward", "update"), pairwise(at_ns), strict=True):
            timeline.on_span(track, track, *span_ns)
        timeline.on_step(step + 1, at_ns[-1])
    timeline.close()


def choose_batch(model: nn.Module, text: Tensor, nbytes: int, ranks: Ranks) -> int:
    """The batch whose computation takes about as long as sending the gradients."""
    sending_s = min(all_reduces_s(nbytes, PROBES))
    computing_s = []
    for step in range(PROBES):
        start_s = time.perf_counter()
        model(sample(text, PROBE_BATCH, step)).backward()
        computing_s.append(time.perf_counter() - start_s)
    batch: float = ranks.gather(PROBE_BATCH * sending_s / min(computing_s[1:]))[0]
    return max(2, min(LARGEST_BATCH, round(batch)))


def sample(text: Tensor, batch: int, seed: int) -> Tensor:
    """A batch: pieces of the text."""
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


if __name__ == "__main__":
    run_rank(Demo, measure)
