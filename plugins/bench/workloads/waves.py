"""What `bytesched wave` measures with, beside the models of `bytesched bench`."""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn
from torch.nn import functional

from bytesched.bench.profile import Profile

from .emulated import EmulatedModel, Pace, emulated_loss
from .models import BATCHES, REAL, Workload

__all__ = ["MODELS", "SharedDevice", "emulated", "real"]

_TOKENS = 64
_VOCABULARY = 128
_WIDTH = 192

MODELS = (*REAL, "lstm")


class SharedDevice(Pace):
    """An accelerator that computes ``slots`` layers at a time; further ones wait.

    Two slots stand for a device that a layer of one batch leaves half idle; one for a device
    that it fills.
    """

    def __init__(self, slots: int) -> None:
        self._slots = threading.Semaphore(slots)
        # One per wave: a thread that waited for another wave has not fallen behind.
        self._own = threading.local()

    def start(self) -> None:
        """A layer begins to compute, as soon as there is a slot for it."""
        self._slots.acquire()
        self._pace().start()

    def finish(self, duration_s: float) -> None:
        """Return when the layer that began last in this thread has computed for so long."""
        self._pace().finish(duration_s)
        self._slots.release()

    def _pace(self) -> Pace:
        if not hasattr(self._own, "pace"):
            self._own.pace = Pace()
        pace: Pace = self._own.pace
        return pace


class LSTM(nn.Module):
    """Characters, one after another: many small kernels that cannot be batched."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Embedding(_VOCABULARY, _WIDTH)
        self.cells = nn.LSTM(_WIDTH, _WIDTH, num_layers=2, batch_first=True)
        self.exit = nn.Linear(_WIDTH, _VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the character that follows each one."""
        logits: Tensor = self.exit(self.cells(self.entry(tokens))[0])
        return logits


def _lstm(batch: int) -> Workload:
    def loss(module: nn.Module, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed % BATCHES)
        tokens = torch.randint(_VOCABULARY, (batch, _TOKENS + 1), generator=generator)
        logits = module(tokens[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return Workload(LSTM(), loss)


def real(name: str, batch: int) -> Workload:
    """A model that computes on the CPU, with batches of that size."""
    return _lstm(batch) if name == "lstm" else REAL[name][0](batch)


def emulated(profile: Profile, slots: int) -> Workload:
    """A model whose layers take the times of ``profile`` on a device with so many slots."""
    return Workload(EmulatedModel(profile, SharedDevice(slots)), emulated_loss)
