"""What a rank does in the tests of model-parallel waves."""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from raised import leaving, raised
from rank_worker import die_at, signals
from torch import Tensor, nn
from torch.nn import functional
from training import listening
from wave_cases import CLASSES, WIDTH, batch_of, dying_in, prints_end

from bytesched.errors import SchedulerClosed
from bytesched.plugins.wave import ModelWaves
from bytesched.plugins.wave.stage import Cargo, Route
from bytesched.plugins.wave.traffic import Traffic

STEPS = 4
#: some steps have larger gradients
MOST_NORM = 0.2
# Far below the size of a layer, so that every stage travels in many chunks.
SMALL: dict[str, Any] = {"partition_bytes": 256, "timeout_s": 100.0}


def chain(layers: int = 9) -> nn.Sequential:
    torch.manual_seed(3)
    activations: list[Callable[[], nn.Module]] = [nn.Tanh, lambda: nn.ReLU(inplace=True)]
    blocks = [
        nn.Sequential(activations[i % 2](), nn.Linear(WIDTH, WIDTH, bias=i % 2 == 0))
        for i in range(layers)
    ]
    return nn.Sequential(
        OrderedDict[str, nn.Module](
            entry=nn.Linear(WIDTH, WIDTH),
            **{f"block{i}": block for i, block in enumerate(blocks)},
            exit=nn.Linear(WIDTH, CLASSES),
        )
    )


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def waves_of(
    model: nn.Sequential, loss_fn: Callable[..., Tensor] = functional.cross_entropy, **fields: Any
) -> ModelWaves:
    return ModelWaves(model, optimizer_of(model), loss_fn, batch_of(0)[0], **SMALL | fields)


def accumulated(ranks: int) -> tuple[dict[str, Tensor], list[list[float]], Tensor]:
    """Weights, losses by step and rank, and an output of one process that has all batches."""
    model = chain()
    optimizer = optimizer_of(model)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        found = []
        for rank in range(ranks):
            inputs, targets = batch_of(step, rank)
            loss = functional.cross_entropy(model(inputs), targets)
            (loss / ranks).backward()
            found.append(loss.item())
        optimizer.step()
        losses.append(found)
    with torch.no_grad():
        return model.state_dict(), losses, model(batch_of(STEPS)[0])


def model_waves_equal() -> tuple[list[str], dict[str, Any]]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    expected, losses, output = accumulated(ranks)
    model = chain()
    if rank:
        # Rank 0's weights are everybody's.
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
    for parameter in model.parameters():
        # Of something before: it counts as little as before zero_grad().
        parameter.grad = torch.ones_like(parameter)
    waves = waves_of(model)
    wrong = []
    for step in range(STEPS):
        loss = waves.step(*batch_of(step, rank))
        if loss.item() != losses[step][rank]:
            wrong.append(f"loss {step}")
    if not torch.equal(waves.predict(batch_of(STEPS)[0]), output):
        wrong.append("output")
    found = waves.state_dict()
    wrong += [name for name in expected if not torch.equal(expected[name], found[name])]
    away = [p.index for p in waves.stages if p.present]
    if away != [rank]:
        wrong.append(f"stages {away} are here after the step")
    figures = waves.stats()
    waves.close()
    return wrong, figures


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """One that moves a parameter without a gradient too, if it is said to be zero."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


class First(nn.Module):
    """Uses a part of its parameters when it is told to, and may have gradients that overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.often = nn.Linear(WIDTH, WIDTH)
        self.seldom = nn.Linear(WIDTH, WIDTH)
        self.uses_all = self.overflows = False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.often(x)
        if self.uses_all:
            y = y + self.seldom(x)
        if self.overflows:
            y.register_hook(lambda gradient: gradient * math.inf)
        return y


def updates_equal(kind: str) -> list[str]:
    """With gradients that are clipped or scaled, and some of which not every step has."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    clips, scales = kind == "clipped", kind == "scaled"

    def made() -> tuple[nn.Sequential, torch.optim.Optimizer, torch.amp.GradScaler]:
        torch.manual_seed(3)
        model = nn.Sequential(First(), *chain(3))
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2, enabled=scales)
        return model, sgd(model), scaler

    def prepare(model: nn.Module, step: int, of_rank: int) -> None:
        model[0].uses_all = step % 2 == 0 and of_rank == 1  # type: ignore[index]
        model[0].overflows = scales and step == 1 and of_rank == 0  # type: ignore[index]

    model, optimizer, scaler = made()
    norms: list[float] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for other in range(ranks):
            prepare(model, step, other)
            inputs, targets = batch_of(step, other)
            loss = scaler.scale(functional.cross_entropy(model(inputs), targets))
            (loss / ranks).backward()
        scaler.unscale_(optimizer)
        if clips:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MOST_NORM)))
        scaler.step(optimizer)
        scaler.update()
    expected, expected_scale = model.state_dict(), scaler.get_scale()

    model, optimizer, scaler = made()
    found_norms: list[float] = []

    def update() -> None:
        waves.unscale_(scaler)
        if clips:
            found_norms.append(float(waves.clip_grad_norm_(MOST_NORM)))
        scaler.step(optimizer)
        scaler.update()

    def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
        return scaler.scale(functional.cross_entropy(output, targets))

    waves = ModelWaves(
        model, optimizer, loss_fn, batch_of(0)[0], update=update if kind else None, **SMALL
    )
    for step in range(STEPS):
        prepare(model, step, rank)
        waves.step(*batch_of(step, rank))
    found = waves.state_dict()
    waves.close()
    assert not clips or min(norms) < MOST_NORM < max(norms)
    torch.testing.assert_close(found_norms, norms, rtol=1e-5, atol=0.0)
    tolerance = 1e-6 if clips else 0.0
    wrong = [
        name
        for name in expected
        if not torch.allclose(found[name], expected[name], rtol=tolerance, atol=tolerance)
    ]
    if scaler.get_scale() != expected_scale:
        wrong.append(f"scale {scaler.get_scale()} and not {expected_scale}")
    return wrong


def refusals() -> list[str]:
    """What cannot be cut, and ranks that disagree; nothing stays open while an error is kept."""
    shared = nn.Linear(4, 4)
    x = torch.zeros(2, 4)
    rank = dist.get_rank()
    three = partial(nn.Sequential, nn.Linear(4, 4), nn.ReLU())
    stranger = {"params": [nn.Parameter(torch.zeros(3))]}
    cases: list[tuple[nn.Sequential, list[Any], dict[str, Any]]] = [
        (nn.Sequential(nn.Linear(4, 4)), [], {}),
        (nn.Sequential(shared, nn.ReLU(), shared), [], {}),
        (nn.Sequential(nn.Linear(4, 4, device="meta"), nn.Linear(4, 4)), [], {}),
        (three(nn.Linear(4, 4)), [stranger], {}),
        (nn.Sequential(nn.Linear(4, 4 + rank), nn.ReLU(), nn.Linear(4, 4)), [], {}),
        (three(nn.Linear(4, 4)), [], {"partition_bytes": 256 * (1 + rank)}),
    ]
    told = []
    for model, groups, fields in cases:
        optimizer = torch.optim.AdamW([{"params": model.parameters()}, *groups])
        fields = {"timeout_s": 10.0, **fields}
        made = partial(ModelWaves, model, optimizer, functional.mse_loss, x, **fields)
        told.append(leaving(made))
    return told


def rank_dies() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    loss_fn = dying_in(functional.cross_entropy, 2, rank == ranks - 1)
    waves = waves_of(chain(), loss_fn, timeout_s=8.0)
    prints_end(waves, lambda step: waves.step(*batch_of(step, rank)))


def dies_while_it_receives() -> None:
    """Rank 0 is killed with the last message half received; the other says what it saw."""
    send, sending = Traffic._send, signals()

    def send_and_say(self: Traffic, route: Route, number: int) -> None:
        send(self, route, number)
        if route.cargo is Cargo.HOME:
            sending.set("sending")

    if dist.get_rank():
        mock.patch.object(Traffic, "_send", send_and_say).start()
    else:
        die_at("sending")
    width = 1 << 12
    model = nn.Sequential(nn.Linear(width, 2 * width), nn.Linear(2 * width, width))
    # Each stage is one message, which takes long.
    fields: dict[str, Any] = {"partition_bytes": 2**28, "timeout_s": 300.0}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    waves = ModelWaves(model, optimizer, functional.mse_loss, torch.ones(1, width), **fields)
    prints_end(waves, lambda _: waves.step(torch.ones(1, width), torch.ones(1, width)))


def user_error() -> str:
    rank = dist.get_rank()

    def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
        if rank == 1:
            raise ValueError("no such target")
        return functional.cross_entropy(output, targets)

    waves = waves_of(chain(), loss_fn, timeout_s=8.0)
    told = raised(lambda: waves.step(*batch_of(0, rank)), Exception)
    waves.close()
    return told


def state_dict_fails() -> str:
    model = chain()
    waves = waves_of(model, timeout_s=600.0)
    waves.step(*batch_of(0, dist.get_rank()))

    def fail(*_: object) -> None:
        raise OSError("no room")

    if dist.get_rank() == 1:
        model[0].register_state_dict_pre_hook(fail)
    said = raised(waves.state_dict, Exception)
    waves.close()
    return said


def used_after_they_were_closed() -> list[str]:
    """Also what was said of settings that do nothing."""
    with listening(logging.WARNING) as said:
        waves = waves_of(chain(), enabled=False, compression="fp16", timeout_s=600.0)
    waves.close()
    uses: list[Callable[[], object]] = [
        lambda: waves.step(*batch_of(0)),
        lambda: waves.predict(batch_of(0)[0]),
        waves.state_dict,
    ]
    return [*said, *(raised(use, SchedulerClosed).partition(": ")[2] for use in uses)]
