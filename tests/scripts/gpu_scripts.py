"""Training on a CUDA device, for the ranks of a test; several ranks may share one device."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from gpu_comparing import DEVICE
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from training import STEPS, Job, adamw, differences, script, sgd, train

from bytesched.config import Config
from bytesched.errors import PluginError
from bytesched.plugins.c10d import ddp
from bytesched.plugins.c10d.attaching import attach_hooked, attach_planned
from bytesched.plugins.c10d.entry import Entry
from bytesched.plugins.c10d.grouping import Grouping
from bytesched.plugins.planned.session import PlannedSession

# Long enough on the device that the host is far ahead of it.
WIDE = 2048
# A wide layer in a few chunks: in those of a `Job` it would be tens of thousands.
LARGE: dict[str, Any] = {"partition_bytes": 1 << 20, "credit_bytes": 2 << 20}


def wide(layers: int = 6) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDE, WIDE) for _ in range(layers)))


def batch(job: Job, step: int) -> Tensor:
    return job.inputs(step, 8, WIDE)


# -- scripts for `compare` -------------------------------------------------------------


@script(adamw, lambda: wide(2), when="before_step", fields=LARGE, shape=(8, WIDE))
def clip_as_torch_chooses(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """Without `foreach`, torch chooses the kernel by the type of the gradients."""
    job.record("norm", clip_grad_norm_(model.parameters(), 0.05))


@script(
    lambda model: adamw(model, lr=torch.tensor(0.01, device=DEVICE), fused=True),
    lambda: wide(4),
    when="after_step",
    fields=LARGE,
    shape=(8, WIDE),
)
def lr_on_the_device(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """The snapshot of a tensor lr lives in device memory, and so may be given away too early."""
    optimizer.param_groups[0]["lr"].mul_(0.5)
    job.kept[1:] = [torch.full((), float("nan"), device=DEVICE) for _ in range(64)]


class Litter(Function):
    """Fills device memory that is free while backward runs: what is still read there is lost."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        torch.full((WIDE, WIDE), float("nan"), device=DEVICE)
        torch.full((WIDE,), float("nan"), device=DEVICE)
        return grad.clone()


class LitteringBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        return Litter.apply(self.linear(x))  # type: ignore[no-any-return, no-untyped-call]


@script(
    partial(sgd, lr=1e-3),
    lambda: nn.Sequential(*(LitteringBlock() for _ in range(6))),
    fields=LARGE,
)
def littered_memory(job: Job, model: Any, optimizer: Any) -> None:
    """The caching allocator hands every freed block out at once, to be overwritten."""

    def litter(_: int) -> None:
        for _ in range(8):
            torch.full((WIDE, WIDE), float("nan"), device=DEVICE)

    inputs = partial(batch, job)
    train(job, model, optimizer, before_step=litter, after_step=litter, inputs=inputs)


class TwoBranches(nn.Module):
    """One branch runs, forward and backward, on a stream of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
        self.last = nn.Linear(WIDE, 8)
        self.side: torch.cuda.Stream | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.side is None:
            self.side = torch.cuda.Stream(DEVICE)
        main = torch.cuda.current_stream(DEVICE)
        self.side.wait_stream(main)
        left = self.left(x)
        with torch.cuda.stream(self.side):
            right = self.right(x)
        main.wait_stream(self.side)
        right.record_stream(main)
        x.record_stream(self.side)
        return self.last(left + right)  # type: ignore[no-any-return]


@script(adamw, TwoBranches, fields={"partition_bytes": 1 << 22, "credit_bytes": 1 << 23})
def side_stream(job: Job, model: Any, optimizer: Any) -> None:
    train(job, model, optimizer, inputs=lambda k: job.inputs(k, 64, WIDE))


@script(partial(sgd, lr=1e-3), lambda: wide(3), fields=LARGE)
def average_on_a_side_stream(job: Job, model: Any, optimizer: Any) -> None:
    """Right after `step()`, weights are read on another stream that waited for this one."""
    averages = [p.detach().clone() for p in model.parameters()]
    side = torch.cuda.Stream(DEVICE)

    def average(_: int) -> None:
        main = torch.cuda.current_stream(DEVICE)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            for mean, p in zip(averages, model.parameters(), strict=True):
                mean.lerp_(p.detach(), 0.1)
        main.wait_stream(side)

    train(job, model, optimizer, after_step=average, inputs=partial(batch, job))
    job.record("averages", averages)


@script(partial(sgd, lr=1e-3), wide, fields=LARGE)
def crossing(job: Job, model: Any, optimizer: Any) -> None:
    train(job, model, optimizer, steps=2 * STEPS, inputs=partial(batch, job))


# -- cases for one rank ----------------------------------------------------------------


@contextlib.contextmanager
def nccl() -> Iterator[dist.ProcessGroup]:
    torch.cuda.set_device(DEVICE)
    group = dist.new_group(backend="nccl")
    assert group is not None
    try:
        yield group
    finally:
        torch.cuda.synchronize(DEVICE)
        dist.destroy_process_group(group)


@contextlib.contextmanager
def attached(
    optimizer: torch.optim.Optimizer, model: nn.Module, **fields: Any
) -> Iterator[PlannedSession]:
    """`wrap` without its shortcuts: a world of one is scheduled, too."""
    config = Config.load(**fields)
    entry = Entry(ddp.base_of(model))
    session: PlannedSession
    if (reduced := ddp.find_ddp(model)) is None:
        session = attach_hooked(optimizer, model, None, config, entry, Grouping(entry.base.size()))
    else:
        session = attach_planned(optimizer, model, reduced, config, entry)
    session.add_optimizer(
        optimizer, type(optimizer), cross=not ddp.why_whole(optimizer, model, config)
    )
    try:
        yield session
        session.flush()
    finally:
        session.close()


def wide_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, *, clips: bool = False
) -> Iterator[int]:
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if clips:
            clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        yield step


def run_over_nccl(
    *,
    wrapped: bool,
    fused: bool = False,
    norms: bool = False,
    clips: bool = False,
    alone: bool = False,
) -> tuple[list[Tensor], dict[str, Any]]:
    """The weights and buffers of a run, and the figures of a wrapped one.

    Args:
        norms: with batch norm, whose buffers DDP broadcasts.
        clips: by the norm of all gradients.
        alone: a module, of which bytesched takes the whole job's group, is wrapped without DDP.
    """
    torch.manual_seed(7)
    with (
        nccl() as group,
        mock.patch.object(distributed_c10d, "_get_default_group", return_value=group),
    ):
        layers = [nn.BatchNorm1d(WIDE), *wide()] if norms else [*wide()]
        inner = nn.Sequential(*layers).to(DEVICE)
        model = inner if alone else DistributedDataParallel(inner, process_group=group)
        optimizer = adamw(model, lr=1e-4, fused=fused)
        x = torch.randn(4096, WIDE, device=DEVICE)
        stats: dict[str, Any] = {}
        with contextlib.ExitStack() as stack:
            if wrapped:
                session = stack.enter_context(attached(optimizer, model))
            for _ in wide_steps(model, optimizer, x, clips=clips):
                pass
            if wrapped:
                stats = session.stats()
        return [t.detach().cpu() for t in (*model.parameters(), *model.buffers())], stats


def over_nccl(how: dict[str, bool]) -> tuple[list[str], dict[str, Any]]:
    """Where a wrapped run over NCCL has not the bits of a plain one, and its figures.

    Args:
        how: as for `run_over_nccl`.
    """
    plain, _ = run_over_nccl(wrapped=False, **how)
    got, stats = run_over_nccl(wrapped=True, **how)
    return list(differences(plain, got, "tensor")), stats


def synchronizing_calls() -> list[str]:
    """Where the host waits for the device in a step over NCCL, after the warm-up."""
    found: list[str] = []
    with nccl() as group:
        model = DistributedDataParallel(wide().to(DEVICE), process_group=group)
        optimizer = adamw(model, lr=1e-4)
        x = torch.randn(4096, WIDE, device=DEVICE)
        with attached(optimizer, model):
            try:
                for step in wide_steps(model, optimizer, x):
                    if step == 2:
                        torch.cuda.set_sync_debug_mode("error")
            except RuntimeError:
                found.append(traceback.format_exc())
            finally:
                torch.cuda.set_sync_debug_mode("default")
    return found


def first_sent() -> tuple[list[int], int]:
    """The chunk sent first in each round, and how many there are; numbered as backward goes.

    Backward takes long on the device, and nearly nothing on the host.
    """
    rounds: list[list[int]] = [[]]
    with nccl() as group:
        model = DistributedDataParallel(wide().to(DEVICE), process_group=group)
        optimizer = sgd(model, lr=1e-4)
        x = torch.randn(16384, WIDE, device=DEVICE)
        with attached(optimizer, model, partition_bytes=4 << 20, credit_bytes=4 << 20) as session:
            wire: Any = session._wire
            start = wire.start

            def noted(tensor: Tensor, key: str) -> Any:
                if " of " in key:
                    rounds[-1].append(int(key.split()[0]))
                return start(tensor, key)

            wire.start = noted
            for _ in wide_steps(model, optimizer, x):
                torch.cuda.synchronize(DEVICE)
                rounds.append([])
            session.flush()
    return [sent[0] for sent in rounds if sent], len(rounds[-2])


def captured_graph() -> str:
    with nccl() as group:
        model = DistributedDataParallel(wide(1).to(DEVICE), process_group=group)
        optimizer = sgd(model, lr=1e-4)
        x = torch.randn(8, WIDE, device=DEVICE)
        with attached(optimizer, model) as session:
            for _ in wide_steps(model, optimizer, x):
                pass
            session.flush()
            # Not "global": NCCL's own thread asks for events all the time.
            graph = torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local")
            try:
                with graph:
                    model(x)
            except PluginError as error:
                return str(error)
    return ""
