"""Training scripts with collectives of their own inside the forward and the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from training import Job, adamw, train

import bytesched
from bytesched.urgency import URGENCY

STEPS = 12
_WIDTH = 64

#: no hold ends by itself: a rank that needs what another one holds would wait for ever
_NEVER = (1e6, 1e6)
#: long beside a section, and short beside a test
_SOON = (0.2, 0.2)


class _Mean(torch.autograd.Function):
    """The mean over all ranks, of the gradient too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _mean(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _mean(grads[0], ctx.group), None


def _mean(x: Tensor, group: Any) -> Tensor:
    x = x.clone()
    with bytesched.urgent():
        dist.all_reduce(x, group=group)
    return x / dist.get_world_size()


class Layer(nn.Module):
    """A layer that mixes what all ranks have, as experts do."""

    def __init__(self, group: Any, *, gates_inside: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(_WIDTH, _WIDTH)
        self._group = group
        self._gates_inside = gates_inside

    def forward(self, x: Tensor) -> Tensor:
        if self._gates_inside:
            with bytesched.urgent("whole layer"):
                return self._mixed(x)
        return self._mixed(x)

    def _mixed(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x))
        mean: Tensor = _Mean.apply(x, self._group)  # type: ignore[no-untyped-call]
        return x + 0.1 * mean


def _train(
    job: Job,
    act: Callable[[Any], object] = lambda _: None,
    limits_s: tuple[float, float] = _NEVER,
    when: str = "before_step",
    layer: Callable[[Any], nn.Module] = Layer,
    steps: int = STEPS,
) -> None:
    """A training in which something is done with the model at a moment of each step."""

    def inputs(step: int) -> Tensor:
        return job.inputs(step, 4, _WIDTH)

    group = dist.new_group()
    model, optimizer = job.begin(adamw, nn.Sequential(*(layer(group) for _ in range(6))))
    hooks: dict[str, Any] = {when: lambda _: act(model)}
    with patch.object(URGENCY, "_limits_s", limits_s):
        train(job, model, optimizer, steps=steps, inputs=inputs, **hooks)
        job.record_state(model, optimizer)
        job.close()
    dist.destroy_process_group(group)


def mixed_by_collectives(job: Job) -> None:
    _train(job)


def gates_inside_sections(job: Job) -> None:
    _train(job, layer=partial(Layer, gates_inside=True))


def mixed_and_clipped(job: Job) -> None:
    _train(job, lambda model: clip_grad_norm_(model.parameters(), 0.05))


def mean_loss_before_step(job: Job) -> None:
    group = dist.new_group()

    def log(model: nn.Module) -> None:
        norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
        job.record("norms", [float(norm) for norm in norms])
        job.record("metric", _mean(torch.ones(1), group))

    _train(job, log)
    dist.destroy_process_group(group)


def read_by_rank_0_alone(job: Job) -> None:
    """Rank 0 waits for a gradient which the others, inside their section, do not start."""
    group = dist.new_group()

    def read(model: Any) -> None:
        if job.rank == 0:
            float(model.module[5].weight.sum())
        job.record("metric", _mean(torch.ones(1), group))

    _train(job, read, _SOON, "after_step", lambda _: nn.Linear(_WIDTH, _WIDTH), steps=6)
    dist.destroy_process_group(group)


def entered_by_rank_0_alone(job: Job) -> None:
    """Sections on which ranks do not agree change nothing but when chunks start."""
    group = dist.new_group()

    def sections(model: nn.Module) -> None:
        if job.rank == 0:
            with bytesched.urgent("alone"):
                pass
        kept = bytesched.urgency.begin("to the end") if job.rank else None
        job.record("metric", dist.all_reduce(torch.ones(1), group=group))
        if kept is not None:
            kept.end()

    _train(job, sections, _SOON)
    dist.destroy_process_group(group)


def raises_inside(job: Job) -> None:
    """An exception that the script catches: nothing is held for it any more."""

    def broken(model: nn.Module) -> None:
        try:
            with bytesched.urgent():
                raise RuntimeError("of the script")
        except RuntimeError:
            assert not URGENCY.is_held

    _train(job, broken)
