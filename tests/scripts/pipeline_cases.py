"""Pipelines on two ranks, twice: trained by a schedule of torch's, and with bytesched on top."""

from __future__ import annotations

import gc
import json
import runpy
import weakref
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from paths import ROOT
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, schedules
from torch.nn.parallel import DistributedDataParallel

import bytesched
from bytesched.pipeline.order import Order
from bytesched.plugins.dropped import wait_for_ends
from bytesched.plugins.pipelines.private import skip_self_sends
from bytesched.plugins.registry import sessions
from bytesched.run.watch import watch

WIDTH = 8
CPU = torch.device("cpu")
STEPS = 5
SMALL: dict[str, Any] = {"partition_bytes": 256, "credit_bytes": 512}
LOOP, V = (0, 1, 0, 1), (0, 1, 1, 0)
#: with weight gradients apart, for stages in the order of `V`
SPLIT = (
    "0F0,0F1,3F0,3I0,3W0,0I0,3F1,3I1,0W0,3W1,0I1,0W1",
    "1F0,2F0,1F1,2F1,2I0,1I0,2W0,2I1,1W0,1I1,2W1,1W1",
)
WHOLE = ("0F0,0F1,3F0,3B0,0B0,3F1,3B1,0B1", "1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1")
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


@dataclass(frozen=True)
class Kind:
    """A schedule, and on which rank each of its stages is."""

    make: Callable[..., Any]
    ranks: tuple[int, ...]
    micro_batches: int = 2


def ordered(rows: Sequence[str], form: str = "compute_only") -> Callable[..., Any]:
    """Makes a schedule with the order ``rows``."""

    def make(stages: list[Any], micro_batches: int, loss_fn: Any) -> Any:
        schedule = schedules._PipelineScheduleRuntime(stages, micro_batches, loss_fn=loss_fn)
        order = {
            rank: [schedules._Action.from_str(cell) for cell in row.split(",")]
            for rank, row in enumerate(rows)
        }
        schedule._prepare_schedule_with_comms(order, format=form)  # type: ignore[arg-type]
        return schedule

    return make


def single(kind: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a schedule of one stage on each rank."""
    return lambda stages, micro_batches, loss_fn: kind(stages[0], micro_batches, loss_fn=loss_fn)


KINDS = {
    "gpipe": Kind(single(ScheduleGPipe), (0, 1)),
    "1f1b": Kind(single(schedules.Schedule1F1B), (0, 1)),
    "interleaved": Kind(schedules.ScheduleInterleaved1F1B, LOOP),
    "interleaved zb": Kind(schedules.ScheduleInterleavedZeroBubble, LOOP),
    "zbv": Kind(schedules.ScheduleZBVZeroBubble, V, 4),
    "dualpipev": Kind(schedules.ScheduleDualPipeV, V, 4),
    "gpipe, one micro-batch": Kind(single(ScheduleGPipe), (0, 1), 1),
    "csv": Kind(ordered(WHOLE), V),
    "csv split": Kind(ordered(SPLIT), V),
    "interleaved on one rank": Kind(schedules.ScheduleInterleaved1F1B, (0, 0)),
    "csv split on one rank": Kind(
        ordered(("0F0,0F1,1F0,1F1,1I0,1W0,0I0,1I1,0W0,1W1,0I1,0W1",)), (0, 0)
    ),
    "gpipe on one rank": Kind(single(ScheduleGPipe), (0,)),
    "never reduced": Kind(
        ordered(("0F0,0SEND_F0,0RECV_B0,0B0", "1RECV_F0,1F0,1B0,1SEND_B0"), "compute_comms"),
        (0, 1),
        1,
    ),
}


def replicas_alone() -> tuple[Any, Any]:
    """The groups of a rank that is a whole pipeline, as every other one is."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return alone[dist.get_rank()], dist.new_group()


def grid() -> tuple[Any, Any]:
    """The groups of this rank's pipeline, and of its replicas."""
    rank, size = dist.get_rank(), dist.get_world_size()
    pipelines = [dist.new_group([first, first + 1]) for first in range(0, size, 2)]
    replicas = [dist.new_group(list(range(place, size, 2))) for place in range(2)]
    return pipelines[rank // 2], replicas[rank % 2]


class Block(nn.Module):
    """Two layers of different sizes around a tanh; what is in `beside` is never used."""

    beside: nn.Parameter

    def __init__(self, number: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(number)
            self.up = nn.Linear(WIDTH, 3 * WIDTH)
            self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return x + self.down(torch.tanh(self.up(x)))


class Pipeline:
    """The stages of one rank, their schedule and optimizer."""

    def __init__(
        self,
        kind: str,
        groups: tuple[Any, Any],
        optimizer: str = "momentum",
        *,
        script: str = "",
        in_ddp: bool = False,
        device: torch.device = CPU,
    ) -> None:
        self.kind = KINDS[kind]
        self.device = device
        pipeline, self.replicas = groups
        place = dist.get_rank(pipeline)
        mine = [stage for stage, rank in enumerate(self.kind.ranks) if rank == place]
        self.blocks = [Block(stage).to(device) for stage in mine]
        if script == "shares" and len(mine) > 1:
            self.blocks[-1].up = self.blocks[0].up
        if script == "leaves out":
            self.blocks[0].beside = nn.Parameter(torch.ones(3))
        if script == "is frozen in part":
            self.blocks[0].up.weight.requires_grad_(False)
        if script == "is in bfloat16":
            for block in self.blocks:
                block.to(torch.bfloat16)
        modules: list[Any] = list(self.blocks)
        if in_ddp:
            modules = [DistributedDataParallel(m, process_group=self.replicas) for m in modules]
        self.modules = modules
        self.stages = [
            PipelineStage(module, stage, len(self.kind.ranks), device, group=pipeline)
            for stage, module in zip(mine, modules, strict=True)
        ]
        # Before 2.13, torch would send to itself in plain training, too.
        skip_self_sends(self.stages)
        self.scaler = torch.amp.GradScaler("cpu", 2.0**127, backoff_factor=2.0**-64)
        # Where there is no loss, it has no scale before it is asked for one.
        self.scaler.scale(torch.zeros(1))
        self.scales = script == "scales losses"
        #: in which gradients are sent
        self.wire = {"sends fp16": torch.float16, "sends bf16": torch.bfloat16}.get(script)
        self.schedule = self.kind.make(self.stages, self.kind.micro_batches, loss_fn=self.loss)
        if script == "sums losses":
            self.schedule.scale_grads = False
        self.optimizer = OPTIMIZERS[optimizer](self.parameters())
        #: losses of evaluations
        self.seen: list[float] = []
        self.is_first, self.is_last = 0 in mine, len(self.kind.ranks) - 1 in mine

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Of one micro-batch."""
        loss = nn.functional.mse_loss(output, target)
        # So large that the first step overflows, and is left out.
        return self.scaler.scale(1000 * loss) if self.scales else loss

    def parameters(self) -> list[nn.Parameter]:
        """Of all stages of this rank, each once."""
        return list(dict.fromkeys(p for block in self.blocks for p in block.parameters()))

    def forward_backward(self, step: int) -> list[float]:
        """One step of the schedule, with data of this replica; the losses, if they are here."""
        torch.manual_seed(1000 * step + dist.get_rank(self.replicas))
        rows = 2 * self.kind.micro_batches
        dtype = self.parameters()[0].dtype
        x, y = (torch.randn(rows, WIDTH, dtype=dtype).to(self.device) for _ in range(2))
        losses: list[Tensor] = []
        self.schedule.step(
            *([x] if self.is_first else []),
            target=y if self.is_last else None,
            losses=losses if self.is_last else None,
        )
        return [float(loss) for loss in losses]

    def evaluate(self, step: int) -> None:
        """Adds losses of forward passes alone to what was `seen`."""
        torch.manual_seed(step)
        rows = 2 * self.kind.micro_batches
        x, y = torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)
        losses: list[Tensor] = []
        with torch.no_grad():
            self.schedule.eval(
                *([x] if self.is_first else []),
                target=y if self.is_last else None,
                losses=losses if self.is_last else None,
            )
        self.seen += map(float, losses)

    def reduce(self) -> None:
        """What a script without DDP does at the end of a step."""
        replicas = dist.get_world_size(self.replicas)
        for parameter in self.parameters():
            if parameter.grad is None:
                continue
            if self.wire is None:
                dist.all_reduce(parameter.grad, group=self.replicas)
                parameter.grad /= replicas
            else:
                # As DDP's compression hooks.
                sent = parameter.grad.to(self.wire).div_(replicas)
                dist.all_reduce(sent, group=self.replicas)
                parameter.grad.copy_(sent)

    def reduced(self, step: int, *, plain: bool) -> float:
        """What a closure does."""
        losses = self.forward_backward(step)
        if plain:
            self.reduce()
        return sum(losses)

    def parameters_now(self) -> list[Any]:
        """Copies of all parameters."""
        return [parameter.detach().clone() for parameter in self.parameters()]

    def values(self) -> list[Any]:
        """All parameters, and their momenta."""
        found = self.parameters_now()
        for _, state in sorted(self.optimizer.state_dict()["state"].items()):
            found += [value.clone() for value in state.values() if isinstance(value, Tensor)]
        return found


def records(pipeline: Pipeline, *, plain: bool, script: str) -> Iterator[Any]:
    """What a training of a few steps shows: losses, and everything in the end."""
    for step in range(STEPS):
        if script != "accumulates" or step % 2 == 0:
            pipeline.optimizer.zero_grad(set_to_none=script != "keeps zeros")
        if script == "has a closure":
            yield pipeline.optimizer.step(partial(pipeline.reduced, step, plain=plain))
            continue
        yield pipeline.forward_backward(step)
        if plain:
            # Each step of a schedule is reduced, as by DDP.
            pipeline.reduce()
        if script == "accumulates" and step % 2 == 0:
            continue
        if script == "clips":
            yield float(nn.utils.clip_grad_norm_(pipeline.parameters(), 0.05))
        if script == "reads":
            yield [p.grad.clone() for p in pipeline.parameters() if p.grad is not None]
        if pipeline.scales:
            pipeline.scaler.step(pipeline.optimizer)
            pipeline.scaler.update()
            yield pipeline.scaler.get_scale()
        else:
            pipeline.optimizer.step()
        if script == "reads":
            yield pipeline.values()
    yield pipeline.values()


def trains_the_example(order: str, folder: str) -> bool:
    """Whether it has the same losses with and without bytesched."""
    train = runpy.run_path(str(ROOT / "examples" / "pipeline_gpt.py"))["train"]
    found = []
    for plain in (True, False):
        path = Path(folder, f"plain{plain}.json")
        train(Namespace(order=order, plain=plain, steps=3, batch=8, json=path))
        if dist.get_rank() == 0:
            found.append(json.loads(path.read_text()))
    return not found or (len(found[0]) == 3 and found[0] == found[1])


def same(one: Any, other: Any) -> bool:
    """Whether two records are equal, bit for bit."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def trains_as_plain(
    kind: str,
    way: str = "schedule",
    script: str = "",
    optimizer: str = "momentum",
    fields: dict[str, Any] | None = None,
    device: torch.device = CPU,
) -> list[int]:
    """Numbers of the records in which a wrapped training differs from a plain one."""
    pairs = grid() if len(set(KINDS[kind].ranks)) > 1 else replicas_alone()
    plain = Pipeline(kind, pairs, optimizer, script=script, device=device)
    expected = list(records(plain, plain=True, script=script))
    wrapped = Pipeline(kind, pairs, optimizer, script=script, in_ddp=way == "ddp", device=device)
    groups = {"groups": wrapped.replicas} if way == "named" else {}
    model = wrapped.modules if way == "modules" else wrapped.schedule
    bytesched.wrap(wrapped.optimizer, model, **groups, **{**SMALL, **(fields or {})})
    found = list(records(wrapped, plain=False, script=script))
    stats = bytesched.stats(wrapped.optimizer)
    assert stats["mode"] == "cross", stats
    bytesched.unwrap(wrapped.optimizer)
    dist.barrier()
    assert len(expected) == len(found)
    return [
        n
        for n, (one, other) in enumerate(zip(expected, found, strict=True))
        if not same(one, other)
    ]


def ddp_alone(kind: str) -> float:
    """How far gradients of DDP-wrapped stages, without bytesched, are from the mean."""
    pairs = grid()
    plain, in_ddp = Pipeline(kind, pairs), Pipeline(kind, pairs, in_ddp=True)
    plain.forward_backward(0)
    plain.reduce()
    in_ddp.forward_backward(0)
    parameters = zip(plain.parameters(), in_ddp.parameters(), strict=True)
    return max(float((p.grad - q.grad).abs().max()) for p, q in parameters)  # type: ignore[operator]


def unchanged_script(kind: str) -> None:
    """Under `bytesched run`: stages in DDP, and nothing of bytesched in the script."""
    pairs = grid()
    expected = list(records(Pipeline(kind, pairs), plain=True, script=""))
    watch()
    script = Pipeline(kind, pairs, in_ddp=True)
    found = list(records(script, plain=False, script=""))
    stats = bytesched.stats(script.optimizer)
    print(stats["mode"], all(map(same, expected, found)), flush=True)


def unwrapped_in_the_middle(kind: str) -> bool:
    """Whether a training goes on as before once it is unwrapped, and schedule and stages too."""
    pairs = grid()
    plain, wrapped = Pipeline(kind, pairs), Pipeline(kind, pairs)
    expected = [*records(plain, plain=True, script=""), *records(plain, plain=True, script="")]
    bytesched.wrap(wrapped.optimizer, wrapped.schedule, **SMALL)
    found = list(records(wrapped, plain=False, script=""))
    bytesched.unwrap(wrapped.optimizer)
    assert "step" not in vars(wrapped.schedule)
    assert not any("perform_reduce_grad" in vars(stage) for stage in wrapped.stages)
    found += records(wrapped, plain=True, script="")
    return all(map(same, expected, found))


def ends_with_its_schedule() -> tuple[list[Any], bool]:
    """The sessions there are, and whether one is kept, when schedule and optimizer are gone."""
    pairs = grid()
    pipeline = Pipeline("csv", pairs)
    bytesched.wrap(pipeline.optimizer, pipeline.schedule, **SMALL)
    list(records(pipeline, plain=False, script=""))
    session = weakref.ref(sessions(pipeline.optimizer)[0])
    del pipeline
    gc.collect()
    wait_for_ends()
    gc.collect()
    return sessions(), session() is not None


def evaluated_by_another_schedule(when: str) -> bool:
    """Whether a forward-only schedule over the same stages changes nothing."""
    pairs = grid()
    plain, wrapped = Pipeline("1f1b", pairs), Pipeline("1f1b", pairs)
    bytesched.wrap(wrapped.optimizer, wrapped.schedule, **SMALL)
    for pipeline in (plain, wrapped):
        only_forward = ScheduleGPipe(pipeline.stages[0], 2)

        def evaluate(at: str, schedule: Any = only_forward, its: Pipeline = pipeline) -> None:
            if at == when:
                with torch.no_grad():
                    schedule.step(*([torch.ones(4, WIDTH)] if its.is_first else []))

        for step in range(STEPS):
            pipeline.optimizer.zero_grad()
            evaluate("before")
            pipeline.forward_backward(step)
            if pipeline is plain:
                pipeline.reduce()
            evaluate("between")
            pipeline.optimizer.step()
            evaluate("after")
    bytesched.unwrap(wrapped.optimizer)
    return same(plain.values(), wrapped.values())


def follows_a_planned_order(path: str) -> float:
    """How far gradients by a planned order are from those of one process."""
    pairs = grid()
    order = Order.read(path)
    count = order.micro_batches
    pipeline, _ = pairs
    place = dist.get_rank(pipeline)
    mine = [stage for stage, rank in enumerate(order.stage_ranks) if rank == place]
    blocks = [Block(stage) for stage in mine]
    stages = [
        PipelineStage(block, stage, order.stages, torch.device("cpu"), group=pipeline)
        for stage, block in zip(mine, blocks, strict=True)
    ]
    schedule = schedules._PipelineScheduleRuntime(
        stages,
        count,
        loss_fn=nn.functional.mse_loss,
    )
    schedule._load_csv(path)
    torch.manual_seed(3)
    x, y = torch.randn(2 * count, WIDTH), torch.randn(2 * count, WIDTH)
    has_last = order.stages - 1 in mine
    schedule.step(*([x] if 0 in mine else []), target=y if has_last else None)
    whole = nn.Sequential(*(Block(stage) for stage in range(order.stages)))
    nn.functional.mse_loss(whole(x), y).backward()
    return max(
        float((p.grad - q.grad).abs().max())  # type: ignore[operator]
        for stage, block in zip(mine, blocks, strict=True)
        for p, q in zip(block.parameters(), whole[stage].parameters(), strict=True)
    )


def optimizer_for_each_stage() -> bool:
    """Whether a rank that wraps two optimizers with one schedule trains as plain."""
    pairs = grid()
    plain, wrapped = Pipeline("interleaved", pairs), Pipeline("interleaved", pairs)
    first, second = (
        [torch.optim.SGD(block.parameters(), lr=0.1 / (n + 1)) for n, block in enumerate(p.blocks)]
        for p in (plain, wrapped)
    )
    for optimizer in second:
        bytesched.wrap(optimizer, wrapped.schedule, **SMALL)
    for pipeline, optimizers in ((plain, first), (wrapped, second)):
        for step in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            pipeline.forward_backward(step)
            if pipeline is plain:
                pipeline.reduce()
            for optimizer in optimizers:
                optimizer.step()
            # Evaluated between two steps of training.
            pipeline.evaluate(step)
    bytesched.unwrap(second[0])
    return same(plain.parameters_now(), wrapped.parameters_now()) and plain.seen == wrapped.seen
