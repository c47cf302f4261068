"""A round of a generator and a discriminator, in ways that are drawn."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from drawn_training import Drawn


def gan_round(drawn: Drawn, step: int) -> None:
    """Gradients of the other's loss are thrown away, or one is frozen while the other learns."""
    job, draw = drawn.job, drawn.draw
    generator, judge = drawn.models
    of_generator, of_judge = drawn.optimizers[:2]
    freezes = draw.choice(("", "", "judge", "generator", "both"))
    freezes_generator = freezes in ("generator", "both")
    freezes_judge = freezes in ("judge", "both")
    # Without a graph, the generator has to be called again for its own loss.
    has_graph = not freezes_generator and draw.random() < 0.7
    if freezes_generator:
        generator.requires_grad_(False)
    with contextlib.nullcontext() if has_graph or freezes_generator else torch.no_grad():
        fake = generator(job.inputs(step))
    drawn.zero(of_judge)
    drawn.at("zeroed", step, judge)
    real = judge(job.inputs(500 + step))
    loss = drawn.counted(real.square().mean() - judge(fake.detach()).square().mean(), step)
    drawn.at("forward", step, judge)
    loss.backward()
    job.record("judge", loss)
    drawn.at("before_step", step, judge)
    job.record("returned", of_judge.step())
    drawn.at("after_step", step, judge)
    generator.requires_grad_(True)
    if not has_graph:
        fake = generator(job.inputs(step))
    drawn.zero(of_generator)
    if freezes_judge:
        judge.requires_grad_(False)
    by = judge.module if freezes_judge and draw.random() < 0.5 else judge
    loss = drawn.counted(by(fake).square().mean(), step)
    loss.backward()
    if draw.random() < 0.5:
        drawn.clip(list(generator.parameters()), 0.1)
    job.record("generator", loss)
    job.record("returned", of_generator.step())
    judge.requires_grad_(True)
