"""Pipelines, AdamA and waves on a CUDA device, for the ranks of a test."""

from __future__ import annotations

import contextlib
import time
from statistics import median
from typing import Any

import adama_cases
import burst_cases
import pipeline_cases
import pipeline_models
import torch
import wave_model_cases
from gpu_comparing import DEVICE
from gpu_scripts import nccl
from torch import Tensor, nn
from torch.nn import functional
from wave_cases import WIDTH

from bytesched.config import Config
from bytesched.errors import PluginError
from bytesched.plugins.burst import Burst
from bytesched.plugins.c10d.entry import Entry
from bytesched.plugins.pipelines import begin
from bytesched.plugins.pipelines.root import staged
from bytesched.plugins.wave import ModelWaves, TickTock

# -- pipelines -------------------------------------------------------------------------


def pipeline(kind: str, script: str, optimizer: str) -> list[int]:
    """Numbers of the records that differ where each rank is a whole pipeline."""
    return pipeline_cases.trains_as_plain(kind, script=script, optimizer=optimizer, device=DEVICE)


def pipeline_over_nccl(kind: str, script: str) -> list[int]:
    """The same of one rank, attached by hand: nobody else has its stages."""
    with nccl() as group:
        plain, wrapped = (
            pipeline_models.Pipeline(kind, (group, group), "adamw", script=script, device=DEVICE)
            for _ in range(2)
        )
        expected = list(pipeline_cases.records(plain, plain=True, script=script))
        config = Config.load(**pipeline_models.SMALL)
        session = begin._attach(
            wrapped.optimizer,
            staged(wrapped.schedule),
            config,
            Entry(group),
            is_named=True,
        )
        with contextlib.closing(session):
            session.add_optimizer(wrapped.optimizer, type(wrapped.optimizer), cross=True)
            found = list(pipeline_cases.records(wrapped, plain=False, script=script))
            session.flush()
            assert session.stats()["mode"] == "cross"
        pairs = enumerate(zip(expected, found, strict=True))
        return [n for n, (one, other) in pairs if not pipeline_cases.same(one, other)]


# -- AdamA -----------------------------------------------------------------------------


def adama(kind: str, micro_batches: int, how: str) -> float:
    """The largest relative difference from one process on the CPU, in float64."""
    return adama_cases.equals_alone(kind, {}, micro_batches, how, {}, str(DEVICE))


# -- waves and bursts ------------------------------------------------------------------


def refusals() -> dict[str, str]:
    """What is said of models on the device where they have to be on the CPU."""
    told = {}
    chain = wave_model_cases.chain().to(DEVICE)
    x = torch.zeros(4, WIDTH, device=DEVICE)
    try:
        ModelWaves(chain, wave_model_cases.optimizer_of(chain), functional.mse_loss, x)
    except PluginError as error:
        told["ModelWaves"] = str(error)
    make, plan = burst_cases.CASES["vgg-on-two-ranks"]
    try:
        Burst(make().to(DEVICE), plan, burst_cases.optimizer_for, functional.cross_entropy)
    except PluginError as error:
        told["Burst"] = str(error)
    return told


#: of which a wave has half
BATCH = 64


def ticktock_ms() -> dict[str, float]:
    """Milliseconds of a step: plain, in two waves one after the other, and beside each other.

    Medians; the three take turns in one process.
    """
    torch.manual_seed(7)
    x = torch.randn(BATCH, 64, 256, device=DEVICE)

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        loss: Tensor = model(batch).square().mean()
        return loss

    def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
        block = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        model = nn.TransformerEncoder(block, 4, enable_nested_tensor=False).to(DEVICE)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4)

    model, optimizer = model_and_optimizer()

    def plain() -> None:
        optimizer.zero_grad()
        loss_fn(model, x).backward()
        optimizer.step()

    waves = {
        name: TickTock(*model_and_optimizer(), loss_fn, overlap=overlap)
        for name, overlap in (("accumulated_ms", False), ("ticktock_ms", True))
    }
    steps: dict[str, Any] = {"plain_ms": plain}
    steps |= {name: lambda wave=wave: wave.step(x) for name, wave in waves.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(40):
        for name, step in steps.items():
            torch.cuda.synchronize(DEVICE)
            began_s = time.perf_counter()
            step()
            torch.cuda.synchronize(DEVICE)
            times[name].append(time.perf_counter() - began_s)
    for wave in waves.values():
        wave.close()
    return {name: 1e3 * median(seconds[10:]) for name, seconds in times.items()}
