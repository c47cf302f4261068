"""A model that is trained as a program says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bytesched.errors import ConfigError
from bytesched.ir.lower import comm_tasks, gradient_groups, pipeline_order, tensor_plan
from bytesched.ir.program import Program

from .. import unwrap, wrap
from ..pipelines import ordered_schedule
from .styles import parallel_styles

__all__ = ["Planned"]


class Planned:
    """A model on the ranks of a checked program: dp, pp, dp x pp, tp, or tp x dp.

    Layers of the program have the names of modules; those that no module has, such as a loss, are
    computed by ``loss_fn``. Gradients are averages over replicas, as with DDP. Call `close` in the
    end.

    Args:
        program: its splits are called ``dp``, ``tp`` and ``micro``.
        model: the whole one, alike on all ranks; with stages a `nn.Sequential`.
        make_optimizer: of the parameters that this rank has.
        loss_fn: the mean over samples, of an output and its target.
        stages: those that the program was pipelined with, if it was.

    Raises `ConfigError` if program, ranks and model do not fit together.
    """

    def __init__(
        self,
        program: Program,
        model: nn.Module,
        make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
        loss_fn: Callable[[Tensor, Tensor], Tensor],
        stages: Sequence[Sequence[str]] = (),
    ) -> None:
        size = dist.get_world_size()
        if sorted(program.orders) != list(range(size)):
            raise ConfigError(
                f"the program is of the ranks {sorted(program.orders)}, and there are {size}"
            )
        self._program, self._loss_fn = program, loss_fn
        self._rank = dist.get_rank()
        mine = next(o for o in program.computes if o.rank == self._rank)
        self._replica, self._replicas = mine.at("dp"), _parts(program, "dp")
        self._model = model
        self._schedule: Any = None
        #: what this rank reduces by itself, in order
        self._reductions: list[tuple[nn.Module, Any]] = []
        #: whether an optimizer was wrapped, which reduces
        self._is_wrapped = False
        splits = {part.label for o in program.computes for part in o.parts}
        if not splits <= {"dp", "tp", "micro"} or {"tp", "micro"} <= splits:
            raise ConfigError(f"no way to run the splits {', '.join(sorted(splits))} together")
        if "micro" in splits:
            self._pipeline(stages)
        elif "tp" in splits:
            self._tensor()
        self._optimizer = make_optimizer(self._model.parameters())
        if self._replicas > 1 and "tp" not in splits:
            self._optimizer = wrap(self._optimizer, self._schedule or self._model)
            self._is_wrapped = True

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        """One iteration with a global batch, alike on all ranks; returns its loss."""
        inputs = inputs[self._replica :: self._replicas]
        targets = targets[self._replica :: self._replicas]
        self._optimizer.zero_grad()
        losses: list[Tensor] = []
        if self._schedule is None:
            losses = [self._loss_fn(self._model(inputs), targets)]
            losses[0].backward()
        else:
            self._schedule.step(
                *([inputs] if self._is_first else []),
                target=targets if self._is_last else None,
                losses=losses if self._is_last else None,
            )
        for module, group in self._reductions:
            for parameter in module.parameters(recurse=False):
                _average(parameter, group, self._replicas)
        self._optimizer.step()
        total = torch.tensor([sum(map(float, losses)), len(losses)], dtype=torch.float64)
        dist.all_reduce(total)
        return float(total[0] / total[1])

    def close(self) -> None:
        """Ends what was wrapped. Idempotent."""
        if self._is_wrapped:
            self._is_wrapped = False
            unwrap(self._optimizer)

    def _pipeline(self, stages: Sequence[Sequence[str]]) -> None:
        from torch.distributed.pipelining import PipelineStage

        order = pipeline_order(self._program, stages, self._replica)
        modules = _stage_modules(self._model, stages)
        computes = list(self._program.computes)
        members = [{o.rank for o in computes if o.at("dp") == r} for r in range(self._replicas)]
        groups = [dist.new_group(sorted(ranks)) for ranks in members]
        group = groups[self._replica]
        place = dist.get_rank(group)
        mine = [stage for stage, rank in enumerate(order.stage_ranks) if rank == place]
        self._is_first, self._is_last = 0 in mine, len(stages) - 1 in mine
        self._model = nn.ModuleList(modules[stage] for stage in mine)
        parts = [
            PipelineStage(modules[stage], stage, len(stages), torch.device("cpu"), group=group)
            for stage in mine
        ]
        self._schedule = ordered_schedule(parts, order, self._loss_fn)

    def _tensor(self) -> None:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor.parallel import parallelize_module

        ranks = torch.empty(self._replicas, _parts(self._program, "tp"), dtype=torch.int64)
        for operator in self._program.computes:
            ranks[operator.at("dp"), operator.at("tp")] = operator.rank
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp"))
        parallelize_module(self._model, mesh["tp"], parallel_styles(tensor_plan(self._program)))
        groups = [dist.new_group(list(group)) for group in gradient_groups(self._program)]
        tasks = comm_tasks(self._program, self._rank)
        self._reductions = [
            (self._model.get_submodule(task.name), groups[task.group])
            for task in sorted(tasks, key=lambda task: task.priority)
        ]


def _parts(program: Program, label: str) -> int:
    return max(
        (p.share.of for o in program.computes for p in o.parts if p.label == label), default=1
    )


def _average(parameter: nn.Parameter, group: Any, replicas: int) -> None:
    """Averages a gradient, or this rank's shard of it."""
    if (gradient := parameter.grad) is not None:
        local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        dist.all_reduce(local, group=group)
        local /= replicas


def _stage_modules(model: nn.Module, stages: Sequence[Sequence[str]]) -> list[nn.Module]:
    """The children that have the layers of each stage, in a row."""
    owner: dict[str, int] = {}
    for stage, layers in enumerate(stages):
        for layer in layers:
            child = layer.partition(".")[0]
            if owner.setdefault(child, stage) != stage:
                raise ConfigError(
                    f"module {child!r} has layers in stages {owner[child]} and {stage}"
                )
    left = [name for name, _ in model.named_children() if name not in owner]
    if left or not isinstance(model, nn.Sequential):
        raise ConfigError(
            f"stages are children of a Sequential; no stage has {', '.join(left) or 'this model'}"
        )
    return [
        nn.Sequential(*(m for name, m in model.named_children() if owner[name] == stage))
        for stage in range(len(stages))
    ]
