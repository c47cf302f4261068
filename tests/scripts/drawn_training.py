"""Training that is drawn from a seed as a whole: models, optimizers, loop, and acts in between.

A `Plan` says what is trained. Numbers have the same bits in every order of addition: of more than
two ranks, all but two have a loss of zero in a round, and gradients of four ranks have few digits.
"""

from __future__ import annotations

import contextlib
import copy
import math
import random
from collections.abc import Callable
from typing import Any

import drawn_acts as acts
import numpy as np
import torch
from drawn_optimizers import Own, made, stepped
from drawn_plans import Plan
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer
from training import Job

At = Callable[[str, int, nn.Module], None]


class Skipped(Exception):
    """Raised where a rank leaves out the rest of a round."""


class Branches(nn.Module):
    """Two layers, of which the second may take no part."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, width), nn.Linear(width, width)
        self.taken = True

    def forward(self, values: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(values))
        return hidden + self.second(hidden) if self.taken else hidden


class Drawn:
    """A plan that is being carried out on one rank."""

    def __init__(self, job: Job, plan: Plan, at: At) -> None:
        self.job, self.plan, self.at = job, plan, at
        self.draw = random.Random(plan.seed)
        self.alone = random.Random(f"{plan.seed} {job.rank}")
        random.seed(3)
        np.random.seed(3)
        self.models: list[Any] = []
        self.optimizers: list[Optimizer] = []
        self.scaler: GradScaler | None = None
        self.finds_unused = plan.loop == "one" and self.draw.random() < 0.3
        #: a step was not skipped
        self._has_stepped = False

    # ---- what is trained

    def build(self) -> None:
        count = {"one": 1, "several": 1}.get(self.plan.loop, 2)
        widths = [8] if count > 1 else [self.draw.choice((8, 16, 40))]
        self.models = [self._model(width) for width in widths * count]
        for index, name in enumerate(self.plan.optimizers):
            optimizer = made(name, self._parameters_of(index))
            for model in self.models if self.plan.loop == "joint" else [self._model_of(index)]:
                self.job.wrap(optimizer, model)
            self.optimizers.append(optimizer)
        if self.plan.loop == "one" and not self.plan.calm and self.draw.random() < 0.2:
            self.scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=2)

    def _model(self, width: int) -> Any:
        if self.finds_unused:
            return self._ddp(Branches(width))
        layers: list[nn.Module] = [nn.Linear(8, width)]
        for _ in range(self.draw.randint(1, 3)):
            layers += [nn.Tanh(), nn.Linear(width, width)]
        if self.plan.loop == "one" and not self.plan.calm and self.draw.random() < 0.2:
            layers.append(nn.BatchNorm1d(width))
        return self._ddp(nn.Sequential(*layers))

    def _ddp(self, module: nn.Module) -> Any:
        if self.plan.world_size == 4:
            for p in module.parameters():
                p.register_hook(with_few_digits)
        return self.job.ddp(module, find_unused_parameters=self.finds_unused)

    def _model_of(self, index: int) -> Any:
        return self.models[index % len(self.models)]

    def _parameters_of(self, index: int) -> list[nn.Parameter]:
        if self.plan.loop == "joint":
            return [p for model in self.models for p in model.parameters()]
        if self.plan.loop == "several":
            return list(self.models[0].parameters())[index :: len(self.plan.optimizers)]
        return list(self._model_of(index).parameters())

    # ---- rounds

    def train(self) -> None:
        self.build()
        one_round = self._gan_round if self.plan.loop == "gan" else self._round
        for step in range(self.plan.rounds):
            # A rank that leaves out the rest of a round draws what the others do all the same.
            self.draw = random.Random(f"{self.plan.seed} {step}")
            with contextlib.suppress(Skipped, acts.Interrupted):
                one_round(step)
            self.draw = random.Random(f"{self.plan.seed} after {step}")
            for optimizer in self.optimizers:
                if isinstance(optimizer, Own) and self.draw.random() < 0.6:
                    optimizer.meddle(self.draw)
            if self.draw.random() < 0.3:
                self.optimizers[0].param_groups[0]["lr"] *= 0.8
            if not self.plan.calm:
                self._between_rounds()
        self.job.record("generators", [random.random(), float(np.random.rand()), torch.rand(2)])
        for optimizer in self.optimizers:
            self.job.record("calls", getattr(optimizer, "calls", 0))
        for model in self.models:
            self.job.record_state(model)
        for optimizer in self.optimizers:
            self.job.record("optimizer", without_callables(optimizer.state_dict()))

    def _between_rounds(self) -> None:
        if self.draw.random() < 0.3:
            able = [act for act in acts.AFTERWARDS if self._can(act)]
            self.draw.choice(able)(self.job, self.models[0], self.optimizers[0], self.draw)
        if self.alone.random() < 0.2:
            float(self.alone.choice(list(self.models[-1].parameters())).sum())
        if self.plan.loop == "one" and self.draw.random() < 0.05:
            self._resume()

    def _resume(self) -> None:
        """From a checkpoint, with new objects."""
        saved = copy.deepcopy((self.models[0].module.state_dict(), self.optimizers[0].state_dict()))
        module = copy.deepcopy(self.models[0].module)
        self.job.unwrap(self.optimizers[0])
        self.models[0] = self._ddp(module)
        module.load_state_dict(saved[0])
        self.optimizers[0] = made(self.plan.optimizers[0], list(module.parameters()))
        self.optimizers[0].load_state_dict(saved[1])
        self.job.wrap(self.optimizers[0], self.models[0])

    def _loss(self, step: int, *models: Any, part: int = 0) -> Tensor:
        values = self.job.inputs(100 * part + step)
        for model in models:
            values = model(values)
        return self.counted(values.square().mean(), step)

    def counted(self, loss: Tensor, step: int) -> Tensor:
        """The loss; zero on all ranks but two that are drawn."""
        ranks = list(range(self.plan.world_size))
        counting = random.Random(f"{self.plan.seed} {step}").sample(ranks, 2)
        return loss if self.job.rank in counting else loss * 0.0

    def zero(self, *optimizers: Optimizer) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=self.draw.random() < 0.7)

    def _round(self, step: int) -> None:
        model = self.models[0]
        keeps = self.plan.world_size == 2 and not self.plan.is_sharded and not self.plan.calm
        if not keeps or self.draw.random() < 0.85:
            self.zero(*self.optimizers)
        self.at("zeroed", step, model)
        for part in range(self.draw.choice((0, 0, 1, 2))):
            self._accumulate(step, 1 + part)
        self.at("accumulated", step, model)
        self._choose_branches(step)
        loss = self._loss(step, *self.models)
        self.at("forward", step, model)
        overflows = self._may_overflow and self.draw.random() < 0.2
        if overflows:
            loss = loss * float("inf")
        self._scaled(loss).backward()
        self.job.record("loss", loss)
        self._before_step(step)
        for index, optimizer in enumerate(self.optimizers):
            self._step(optimizer, step)
            if index == 0:
                self.at("after_step", step, model)
        self._has_stepped = self._has_stepped or not overflows

    def _gan_round(self, step: int) -> None:
        """What the other's loss leaves is thrown away, or one is frozen while the other learns."""
        job, draw = self.job, self.draw
        generator, judge = self.models
        of_generator, of_judge = self.optimizers[:2]
        freezes = draw.choice(("", "", "judge", "generator", "both"))
        freezes_generator = freezes in ("generator", "both")
        freezes_judge = freezes in ("judge", "both")
        # Without a graph, the generator has to be called again for its own loss.
        has_graph = not freezes_generator and draw.random() < 0.7
        if freezes_generator:
            generator.requires_grad_(False)
        with contextlib.nullcontext() if has_graph or freezes_generator else torch.no_grad():
            fake = generator(job.inputs(step))
        self.zero(of_judge)
        self.at("zeroed", step, judge)
        real = judge(job.inputs(500 + step))
        loss = self.counted(real.square().mean() - judge(fake.detach()).square().mean(), step)
        self.at("forward", step, judge)
        loss.backward()
        job.record("judge", loss)
        self.at("before_step", step, judge)
        job.record("returned", of_judge.step())
        self.at("after_step", step, judge)
        generator.requires_grad_(True)
        if not has_graph:
            fake = generator(job.inputs(step))
        self.zero(of_generator)
        if freezes_judge:
            judge.requires_grad_(False)
        by = judge.module if freezes_judge and draw.random() < 0.5 else judge
        loss = self.counted(by(fake).square().mean(), step)
        loss.backward()
        if draw.random() < 0.5:
            self.clip(list(generator.parameters()), 0.1)
        job.record("generator", loss)
        job.record("returned", of_generator.step())
        judge.requires_grad_(True)

    def _choose_branches(self, step: int) -> None:
        """Those of the next pass: the same on all ranks, or not."""
        if self.finds_unused:
            module = self.models[0].module
            is_taken = (self.alone if step % 2 else self.draw).random() < 0.6
            module.taken = is_taken or self._must_step

    def _accumulate(self, step: int, part: int) -> None:
        """A backward pass before the last one; where sums stay exact, ranks may reduce it, too."""
        self._choose_branches(step)
        is_exact = self.plan.world_size == 2 or (self.plan.world_size == 4 and not self.scaler)
        reduces = self.draw.random() < 0.4 and is_exact
        with contextlib.ExitStack() as stack:
            for model in () if reduces else self.models:
                stack.enter_context(model.no_sync())
            self._scaled(self._loss(step, *self.models, part=part)).backward()

    @property
    def _must_step(self) -> bool:
        """True until torch's fused SGD has momentum of every parameter, all made in one step."""
        return self.plan.optimizers[0] == "sgd_fused" and not self._has_stepped

    @property
    def _may_overflow(self) -> bool:
        return self.scaler is not None and not self._must_step

    def _before_step(self, step: int) -> None:
        if self.scaler is not None and self.draw.random() < 0.5:
            self.scaler.unscale_(self.optimizers[0])
        parameters = [p for model in self.models for p in model.parameters()]
        clips = self.draw.choice(("norm", "value", "", ""))
        if clips == "norm":
            self.clip(parameters, self.draw.choice((0.01, 1.0)))
        elif clips == "value":
            clip_grad_value_(parameters, 0.05)
        if not self.plan.calm:
            for some in (acts.READING, acts.CHANGING, acts.TOGETHER):
                if self.draw.random() < 0.2:
                    able = [act for act in some if self._can(act)]
                    self.draw.choice(able)(self.job, self.models[0], self.optimizers[0], self.draw)
        if self.alone.random() < 0.1 and not self.plan.is_sharded:
            acts.read_one(self.job, self.models[0], None, self.alone)
        self.at("before_step", step, self.models[0])

    def clip(self, parameters: list[nn.Parameter], most: float) -> None:
        """By their norm; unless that is rounded otherwise, and all that follows from it."""
        most = math.inf if self.plan.makes_norms_of_parts else most
        self.job.record("norm", clip_grad_norm_(parameters, most))

    def _can(self, act: Any) -> bool:
        """False for what this training refuses by name, or plain training cannot do."""
        left_out: tuple[Any, ...] = ()
        if self.plan.is_sharded:
            left_out += acts.DIVERGING
        if self.plan.makes_norms_of_parts:
            left_out += (acts.clipped, acts.clipped_in_parts)
        if set(self.plan.optimizers) & {"CallsBack", "LBFGS"}:
            left_out += (acts.saved, acts.loaded)
        if self.scaler is not None or "LBFGS" in self.plan.optimizers:
            left_out += (acts.stepped_again, acts.set_to_none, acts.deleted)
        if self.finds_unused:
            left_out += (acts.evaluated,)
        return act not in left_out

    def _scaled(self, loss: Tensor) -> Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    def _step(self, optimizer: Optimizer, step: int) -> None:
        if self.scaler is not None:
            self.scaler.step(optimizer)
            self.scaler.update()
            self.job.record("scale", self.scaler.get_scale())
            return

        def closure() -> Tensor:
            # Gradients that stay would be added to on more than two ranks.
            with torch.enable_grad():
                for each in [optimizer] if self.plan.world_size == 2 else self.optimizers:
                    each.zero_grad()
                loss = self._loss(step, *self.models)
                loss.backward()
            return loss

        self.job.record(
            "returned", stepped(optimizer, None if self.plan.calm else closure, self.draw)
        )


def with_few_digits(gradient: Tensor) -> Tensor:
    """So few that four of them have one sum, in whatever order, also when it is added to."""
    return (gradient * 4096).round() / 4096


def without_callables(value: Any) -> Any:
    """What can be compared of a state."""
    if isinstance(value, dict):
        return {key: without_callables(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_callables(item) for item in value]
    return None if callable(value) and not isinstance(value, Tensor) else value


def nothing_happens(moment: str, step: int, model: nn.Module) -> None:
    """A rank's fate in plain training."""


def train(job: Job, plan: Plan, at: At = nothing_happens) -> None:
    Drawn(job, plan, at).train()
