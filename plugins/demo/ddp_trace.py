"""A trace of plain DDP, on the same tracks as bytesched's own, to lay the two side by side.

Annotations are real objects here, not text: DDP compares those of a communication hook.
"""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from bytesched.trace.timeline import Timeline


class BucketClock:
    """Has a communication hook that averages as DDP does by itself, and times every bucket."""

    def __init__(self) -> None:
        self._sends: list[tuple[int, int, int]] = []

    def average(self, group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """The communication hook."""
        start_ns = time.perf_counter_ns()
        index = bucket.index()
        buffer = bucket.buffer().div_(group.size())
        work = dist.all_reduce(buffer, group=group, async_op=True)

        def averaged(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            self._sends.append((index, start_ns, time.perf_counter_ns()))
            return future.value()[0]

        done: torch.futures.Future[Tensor] = work.get_future().then(averaged)
        return done

    def take(self) -> list[tuple[int, int, int]]:
        """(index, start, end) of every bucket sent since the last call."""
        sends, self._sends = self._sends, []
        return sends


def trace_ddp(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[nn.Module, int], Tensor],
    *,
    steps: int,
    folder: str,
) -> None:
    """Train for some steps and write `rank{n}.trace.json` into the folder."""
    group = model.process_group
    timeline = Timeline(folder, rank=dist.get_rank())
    clock = BucketClock()
    model.register_comm_hook(group, clock.average)
    computed_ns = 0

    def gradient_ready(_: Tensor) -> None:
        nonlocal computed_ns
        computed_ns = time.perf_counter_ns()

    handles = [p.register_post_accumulate_grad_hook(gradient_ready) for p in model.parameters()]
    for step in range(steps):
        optimizer.zero_grad()
        forward_ns = time.perf_counter_ns()
        loss = loss_of(model, step)
        backward_ns = time.perf_counter_ns()
        loss.backward()
        step_ns = time.perf_counter_ns()
        optimizer.step()
        end_ns = time.perf_counter_ns()
        timeline.on_span("forward", "forward", forward_ns, backward_ns)
        timeline.on_span("backward", "backward", backward_ns, step_ns)
        timeline.on_span("wait", "end of backward", computed_ns, step_ns)
        for index, start_ns, stop_ns in clock.take():
            name = f"bucket {index}"
            timeline.on_span("send", name, start_ns, stop_ns, {"chunk": index})
        timeline.on_span("update", "optimizer.step", step_ns, end_ns)
        timeline.on_span("step", "optimizer.step", step_ns, end_ns)
        timeline.on_step(step + 1, end_ns)
    for handle in handles:
        handle.remove()
    timeline.close()
