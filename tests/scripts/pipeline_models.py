"""Pipelines of a few small blocks: their schedules, the ranks that share them, one rank's part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, schedules
from torch.nn.parallel import DistributedDataParallel

from bytesched.plugins.pipelines.private import skip_self_sends

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


def ordered(rows: Sequence[str], *, reduces: bool = True) -> Callable[..., Any]:
    """Makes a schedule with the order ``rows``, with or without reductions."""

    def make(stages: list[Any], micro_batches: int, loss_fn: Any) -> Any:
        schedule = schedules._PipelineScheduleRuntime(stages, micro_batches, loss_fn=loss_fn)
        order = {
            rank: [schedules._Action.from_str(cell) for cell in row.split(",")]
            for rank, row in enumerate(rows)
        }
        schedule._prepare_schedule_with_comms(order)
        if not reduces:
            for rank, row in schedule.pipeline_order_with_comms.items():
                kept = [action for action in row if "REDUCE_GRAD" not in str(action)]
                schedule.pipeline_order_with_comms[rank] = kept
        return schedule

    return make


def single(kind: Callable[..., Any]) -> Callable[..., Any]:
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
    "never reduced": Kind(ordered(("0F0,0B0", "1F0,1B0"), reduces=False), (0, 1), 1),
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
    """The stages of one rank, their schedule and optimizer, and what a script does with them."""

    def __init__(
        self,
        kind: str,
        groups: tuple[Any, Any],
        optimizer: str = "momentum",
        *,
        plain: bool = False,
        script: str = "",
        in_ddp: bool = False,
        device: torch.device = CPU,
    ) -> None:
        self.kind = KINDS[kind]
        #: each step is reduced here, as a script without DDP does
        self.plain = plain
        self.script = script
        self.device = device
        pipeline, self.replicas = groups
        place = dist.get_rank(pipeline)
        mine = [stage for stage, rank in enumerate(self.kind.ranks) if rank == place]
        self.blocks = [Block(stage).to(device) for stage in mine]
        if script == "shares" and len(mine) > 1:
            self.blocks[-1].up = self.blocks[0].up
        elif script == "leaves out":
            self.blocks[0].beside = nn.Parameter(torch.ones(3))
        elif script == "is frozen in part":
            self.blocks[0].up.weight.requires_grad_(False)
        elif script == "is in bfloat16":
            self.blocks = [block.to(torch.bfloat16) for block in self.blocks]
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
        loss = nn.functional.mse_loss(output, target)
        # So large that the first step overflows, and is left out.
        return self.scaler.scale(1000 * loss) if self.scales else loss

    def parameters(self) -> list[nn.Parameter]:
        """Of all stages of this rank, each once."""
        return list(dict.fromkeys(p for block in self.blocks for p in block.parameters()))

    def forward_backward(self, step: int) -> list[float]:
        """One step of the schedule, with data of this replica; the losses, if they are here."""
        torch.manual_seed(1000 * step + dist.get_rank(self.replicas))
        losses = self._run(self.schedule.step)
        if self.plain:
            self.reduce()
        return losses

    def one_step(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.forward_backward(step)
        self.optimizer.step()

    def evaluate(self, step: int) -> None:
        """Adds losses of forward passes alone to what was `seen`."""
        torch.manual_seed(step)
        with torch.no_grad():
            self.seen += self._run(self.schedule.eval)

    def _run(self, run: Callable[..., object]) -> list[float]:
        rows = 2 * self.kind.micro_batches
        dtype = self.parameters()[0].dtype
        x, y = (torch.randn(rows, WIDTH, dtype=dtype).to(self.device) for _ in range(2))
        losses: list[Tensor] = []
        run(
            *([x] if self.is_first else []),
            target=y if self.is_last else None,
            losses=losses if self.is_last else None,
        )
        return [float(loss) for loss in losses]

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

    def parameters_now(self) -> list[Any]:
        return [parameter.detach().clone() for parameter in self.parameters()]

    def values(self) -> list[Any]:
        found = self.parameters_now()
        for _, state in sorted(self.optimizer.state_dict()["state"].items()):
            found += [value.clone() for value in state.values() if isinstance(value, Tensor)]
        return found
