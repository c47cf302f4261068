"""Pipelines, AdamA and waves on a CUDA device, for the ranks of a test."""

from __future__ import annotations

import contextlib

import adama_cases
import burst_cases
import pipeline_cases
import pipeline_models
import torch
import wave_model_cases
from gpu_comparing import DEVICE
from gpu_scripts import nccl
from raised import raised
from torch.nn import functional
from training import differences
from wave_cases import WIDTH

from bytesched.config import Config
from bytesched.plugins.c10d.entry import Entry
from bytesched.plugins.pipelines import begin
from bytesched.plugins.pipelines.root import staged
from bytesched.plugins.wave import ModelWaves

# -- pipelines -------------------------------------------------------------------------


def pipeline(kind: str, script: str, optimizer: str) -> list[str]:
    return pipeline_cases.trains_as_plain(kind, script=script, optimizer=optimizer, device=DEVICE)


def pipeline_over_nccl(kind: str, script: str) -> list[str]:
    """The same of one rank, attached by hand: nobody else has its stages."""
    with nccl() as group:
        plain, wrapped = (
            pipeline_models.Pipeline(
                kind, (group, group), "adamw", plain=plain, script=script, device=DEVICE
            )
            for plain in (True, False)
        )
        expected = list(pipeline_cases.records(plain))
        config = Config.load(**pipeline_models.SMALL)
        session = begin._attach(
            wrapped.optimizer, staged(wrapped.schedule), config, Entry(group), is_named=True
        )
        with contextlib.closing(session):
            session.add_optimizer(wrapped.optimizer, type(wrapped.optimizer), cross=True)
            found = list(pipeline_cases.records(wrapped))
            session.flush()
            assert session.stats()["mode"] == "cross"
        return list(differences(expected, found, "records"))


# -- AdamA -----------------------------------------------------------------------------


def adama(kind: str, micro_batches: int, how: str) -> float:
    """The largest relative difference from one process on the CPU, in float64."""
    return adama_cases.equals_alone(kind, {}, micro_batches, how, {}, str(DEVICE))


# -- waves and bursts ------------------------------------------------------------------


def refusals() -> list[str]:
    """What is said of models on the device where they have to be on the CPU."""
    chain = wave_model_cases.chain().to(DEVICE)
    x = torch.zeros(4, WIDTH, device=DEVICE)
    optimizer = wave_model_cases.optimizer_of(chain)
    model = burst_cases.vgg_like().to(DEVICE)
    return [
        raised(lambda: ModelWaves(chain, optimizer, functional.mse_loss, x)),
        raised(lambda: burst_cases.burst_of("vgg-on-two-ranks", model=model)),
    ]
