"""What a forward pass leaves behind beside its output: statistics, and random numbers drawn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

_DRAWING = (nn.modules.dropout._DropoutNd, nn.RReLU)


def interfering(model: nn.Module) -> list[str]:
    """Names of the modules by which one wave changes what the next one computes.

    Forward passes never overlap, so the effect is that of gradient accumulation: statistics are
    updated once per wave, random numbers are drawn in the order of the waves.
    """
    return [
        f"{name or 'the model'} ({type(module).__name__})"
        for name, module in model.named_modules()
        if module.training and (_keeps_statistics(module) or _draws(module))
    ]


def _keeps_statistics(module: nn.Module) -> bool:
    return isinstance(module, _NormBase) and bool(module.track_running_stats)


def _draws(module: nn.Module) -> bool:
    if isinstance(module, _DRAWING):
        return getattr(module, "p", 1.0) > 0
    return isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and module.dropout > 0


class WaveStates:
    """Statistics and random numbers for each wave, as if it were a rank of its own.

    Wave 0 has those of the model and of torch. The others begin with a copy of the statistics,
    and with seeds of their own. They are put in place for a wave's forward pass.

    Args:
        ranks: how many there are. Scripts add the rank to the seed: a wave adds more than that.
    """

    def __init__(self, model: nn.Module, waves: int, ranks: int) -> None:
        holders = [module for module in model.modules() if _keeps_statistics(module)]
        self._buffers = [
            (module, name, [buffer, *(buffer.clone() for _ in range(waves - 1))])
            for module in holders
            for name, buffer in module.named_buffers(recurse=False)
        ]
        devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
        self._generators = [torch.default_generator] + [
            torch.cuda.default_generators[device.index] for device in devices
        ]
        self._random = [self._seeded(wave * ranks) for wave in range(waves)]

    def _seeded(self, more: int) -> list[torch.Tensor]:
        return [
            torch.Generator(generator.device)
            .manual_seed(generator.initial_seed() + more)
            .get_state()
            for generator in self._generators
        ]

    @contextmanager
    def of(self, wave: int) -> Iterator[None]:
        """Inside, the model has the statistics of ``wave``, and torch its random numbers."""
        if wave == 0:
            yield
            return
        mine = [generator.get_state() for generator in self._generators]
        for module, name, copies in self._buffers:
            module._buffers[name] = copies[wave]
        self._set(self._random[wave])
        try:
            yield
        finally:
            self._random[wave] = [generator.get_state() for generator in self._generators]
            self._set(mine)
            for module, name, copies in self._buffers:
                module._buffers[name] = copies[0]

    def _set(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)
