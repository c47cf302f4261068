"""Training that is drawn from a seed as a whole: models, optimizers, loop, and acts in between.

A `Plan` says what is trained. Numbers have the same bits in every order of addition: of more than
two ranks, all but two have a loss of zero in a round.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import scripts_hostile as hostile
import torch
from drawn_optimizers import LATE_STEPS, SETTINGS, Own, made, stepped
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer
from training import Job

#: where something may happen to a rank, in the order of a round
MOMENTS = ("zeroed", "accumulated", "forward", "backward", "before_step", "after_step")
LOOPS = ("one", "several", "two_models", "gan", "joint")

At = Callable[[str, int, nn.Module], None]


class Skipped(Exception):
    """Raised where a rank leaves out the rest of a round."""


@dataclass(frozen=True)
class Plan:
    """A training; what it does in its rounds is drawn from `seed`."""

    seed: str
    world_size: int = 2
    loop: str = "one"
    #: names of `drawn_optimizers`
    optimizers: tuple[str, ...] = ("adamw",)
    #: fields of Config
    options: dict[str, Any] = field(default_factory=dict)
    #: no acts in between, and no backward pass inside `step()`
    calm: bool = False

    @property
    def rounds(self) -> int:
        if "Late" in self.optimizers:
            return LATE_STEPS
        return 4 + random.Random(f"{self.seed} rounds").randrange(4)

    @property
    def is_sharded(self) -> bool:
        return bool(self.options.get("shard"))


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
        SETTINGS["rate"] = 1.0
        self.models: list[Any] = []
        self.optimizers: list[Optimizer] = []
        self.scaler: GradScaler | None = None
        self.finds_unused = plan.loop == "one" and self.draw.random() < 0.3

    # ---- what is trained

    def build(self) -> None:
        count = {"one": 1, "several": 1}.get(self.plan.loop, 2)
        widths = [8] if count > 1 else [self._width()]
        self.models = [self._model(width) for width in widths * count]
        for index, name in enumerate(self.plan.optimizers):
            optimizer = made(name, self._parameters_of(index))
            for model in self.models if self.plan.loop == "joint" else [self._model_of(index)]:
                self.job.wrap(optimizer, model)
            self.optimizers.append(optimizer)
        if self.plan.loop == "one" and not self.plan.calm and self.draw.random() < 0.2:
            self.scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=2)

    def _width(self) -> int:
        return 128 if "Large" in self.plan.optimizers else self.draw.choice((8, 16, 40))

    def _model(self, width: int) -> Any:
        if self.finds_unused:
            return self.job.ddp(Branches(width), find_unused_parameters=True)
        layers: list[nn.Module] = [nn.Linear(8, width)]
        for _ in range(1 if "Large" in self.plan.optimizers else self.draw.randint(1, 3)):
            layers += [nn.Tanh(), nn.Linear(width, width)]
        if self.plan.loop == "one" and not self.plan.calm and self.draw.random() < 0.2:
            layers.append(nn.BatchNorm1d(width))
        return self.job.ddp(nn.Sequential(*layers))

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
            with contextlib.suppress(Skipped, hostile.Interrupted):
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
            acts = [act for act in hostile.AFTERWARDS if self._can(act)]
            self.draw.choice(acts)(self.job, self.models[0], self.optimizers[0], self.draw)
        if self.alone.random() < 0.2:
            float(self.alone.choice(list(self.models[-1].parameters())).sum())
        if self.plan.loop == "one" and self.draw.random() < 0.05:
            self._resume()

    def _resume(self) -> None:
        """From a checkpoint, with new objects."""
        saved = copy.deepcopy((self.models[0].module.state_dict(), self.optimizers[0].state_dict()))
        module = copy.deepcopy(self.models[0].module)
        self.job.unwrap(self.optimizers[0])
        self.models[0] = self.job.ddp(module, find_unused_parameters=self.finds_unused)
        module.load_state_dict(saved[0])
        self.optimizers[0] = made(self.plan.optimizers[0], list(module.parameters()))
        self.optimizers[0].load_state_dict(saved[1])
        self.job.wrap(self.optimizers[0], self.models[0])

    def _loss(self, step: int, *models: Any, part: int = 0) -> Tensor:
        values = self.job.inputs(100 * part + step)
        for model in models:
            values = model(values)
        return self._counted(values.square().mean(), step)

    def _counted(self, loss: Tensor, step: int) -> Tensor:
        """The loss; zero on all ranks but two that are drawn."""
        ranks = list(range(self.plan.world_size))
        counting = random.Random(f"{self.plan.seed} {step}").sample(ranks, 2)
        return loss if self.job.rank in counting else loss * 0.0

    def _zero(self, *optimizers: Optimizer) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=self.draw.random() < 0.7)

    def _round(self, step: int) -> None:
        model = self.models[0]
        if self.finds_unused:
            model.module.taken = (self.alone if step % 2 else self.draw).random() < 0.6
        keeps = self.plan.world_size == 2 and not self.plan.is_sharded and not self.plan.calm
        if not keeps or self.draw.random() < 0.85:
            self._zero(*self.optimizers)
        self.at("zeroed", step, model)
        for part in range(self.draw.choice((0, 0, 1, 2))):
            with contextlib.ExitStack() as stack:
                for each in self.models:
                    stack.enter_context(each.no_sync())
                self._scaled(self._loss(step, *self.models, part=1 + part)).backward()
        self.at("accumulated", step, model)
        loss = self._loss(step, *self.models)
        self.at("forward", step, model)
        if self.scaler is not None and self.draw.random() < 0.2:
            loss = loss * float("inf")
        self._scaled(loss).backward()
        self.job.record("loss", loss)
        self._before_step(step)
        for index, optimizer in enumerate(self.optimizers):
            self._step(optimizer, step)
            if index == 0:
                self.at("after_step", step, model)

    def _before_step(self, step: int) -> None:
        if self.scaler is not None and self.draw.random() < 0.5:
            self.scaler.unscale_(self.optimizers[0])
        parameters = [p for model in self.models for p in model.parameters()]
        clips = self.draw.choice(("norm", "value", "", ""))
        if clips == "norm":
            self.job.record("norm", clip_grad_norm_(parameters, self.draw.choice((0.01, 1.0))))
        elif clips == "value":
            clip_grad_value_(parameters, 0.05)
        if not self.plan.calm:
            for acts in (hostile.READING, hostile.CHANGING, hostile.TOGETHER):
                if self.draw.random() < 0.2:
                    able = [act for act in acts if self._can(act)]
                    self.draw.choice(able)(self.job, self.models[0], self.optimizers[0], self.draw)
        if self.alone.random() < 0.1:
            hostile._read_one(self.job, self.models[0], None, self.alone)
        self.at("before_step", step, self.models[0])

    def _can(self, act: Any) -> bool:
        """False for what this training refuses by name, or plain training cannot do."""
        left_out: tuple[Any, ...] = ()
        if self.plan.is_sharded:
            left_out += (*hostile.DIVERGING, *hostile.ASKING)
        if set(self.plan.optimizers) & {"CallsBack", "LBFGS"}:
            left_out += (hostile._saved, hostile._loaded)
        if self.scaler is not None or "LBFGS" in self.plan.optimizers:
            left_out += (hostile._stepped_again, hostile._set_to_none, hostile._deleted)
        if self.finds_unused:
            left_out += (hostile._evaluated,)
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

    def _gan_round(self, step: int) -> None:
        """A generator and a discriminator; gradients of the other one's loss are thrown away."""
        generator, judge = self.models
        of_generator, of_judge = self.optimizers[:2]
        freezes = self.draw.random() < 0.3
        fake = generator(self.job.inputs(step))
        self._zero(of_judge)
        self.at("zeroed", step, judge)
        real = judge(self.job.inputs(500 + step))
        loss = self._counted(real.square().mean() - judge(fake.detach()).square().mean(), step)
        self.at("forward", step, judge)
        loss.backward()
        self.job.record("judge", loss)
        self.at("before_step", step, judge)
        self.job.record("returned", of_judge.step())
        self.at("after_step", step, judge)
        self._zero(of_generator)
        if freezes:
            judge.requires_grad_(False)
        loss = self._counted((judge.module if freezes else judge)(fake).square().mean(), step)
        loss.backward()
        if self.draw.random() < 0.5:
            self.job.record("norm", clip_grad_norm_(generator.parameters(), 0.1))
        self.job.record("generator", loss)
        self.job.record("returned", of_generator.step())
        judge.requires_grad_(True)


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
    """Carries a plan out."""
    Drawn(job, plan, at).train()
