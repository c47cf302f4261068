"""Models for a GPU that ranks share, and the same so small that a test trains them on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from .models import CLASSES, GPT, Block, Bottleneck, bottlenecks

_BATCHES: Final = 4


class _Residual(nn.Module):
    """A normalised layer around a shortcut: four small tensors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.gelu(self.linear(self.norm(x)))


class _Classifier(nn.Module):
    """Layers in a row whose loss is their forward."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.layers(x), labels)


@dataclass(frozen=True)
class GpuWorkload:
    """A model and the batches of a rank, on a device."""

    #: a new one; called with a batch it returns its loss
    make: Callable[[], nn.Module]
    batches: list[tuple[Tensor, ...]]
    #: whether what may be in bfloat16 is, on a GPU
    mixes: bool

    @staticmethod
    def blocks(model: nn.Module) -> list[nn.Module]:
        """The parts of the model that run one after another."""
        return [m for m in model.modules() if isinstance(m, (Block, Bottleneck, _Residual))]


def _gpt(is_small: bool) -> nn.Module:
    """98 M parameters, unless it is small."""
    return GPT(64, 16, 32, 2, 2) if is_small else GPT(8192, 1024, 768, 12, 12)


def _conv(is_small: bool) -> nn.Module:
    """The blocks of a ResNet-50, behind one convolution instead of that and a pool."""
    stages = [(64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)]
    if is_small:
        stages = [(4, 1, 1), (8, 1, 2)]
    channels = stages[0][0]
    before = nn.Conv2d(3, channels, 7, 4, padding=3, bias=False), nn.BatchNorm2d(channels)
    return _Classifier(*before, nn.ReLU(), *bottlenecks(channels, stages))


def _many(is_small: bool) -> nn.Module:
    """So many small tensors, 148, that the host decides how long an iteration takes."""
    width, depth = (16, 3) if is_small else (256, 36)
    blocks = [_Residual(width) for _ in range(depth)]
    return _Classifier(nn.Linear(width, width), *blocks, nn.Linear(width, CLASSES))


#: By name: the model, and the shape of a batch (of tokens: one more than are predicted), whole and
#: small.
_KINDS: dict[str, tuple[Callable[[bool], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "gpt": (_gpt, (32, 1025), (2, 17)),
    "conv": (_conv, (64, 3, 224, 224), (4, 3, 16, 16)),
    "small": (_many, (64, 256), (4, 16)),
}


def gpu_workload(
    name: str, batch: int, device: torch.device, rank: int, *, is_small: bool
) -> GpuWorkload:
    """The workload ``name``, with so many samples in a batch, or as many as is its own."""
    build, whole, small = _KINDS[name]
    size, *shape = small if is_small else whole
    size = batch or size
    generator = torch.Generator(device).manual_seed(1000 + rank)

    def integers(most: int, *sizes: int) -> Tensor:
        return torch.randint(most, sizes, device=device, generator=generator)

    def drawn() -> tuple[Tensor, ...]:
        if name == "gpt":
            return (integers(64 if is_small else 8192, size, *shape),)
        x = torch.randn(size, *shape, device=device, generator=generator)
        return x, integers(CLASSES, size)

    def make() -> nn.Module:
        with torch.device(device):
            return build(is_small)

    return GpuWorkload(make, [drawn() for _ in range(_BATCHES)], mixes=name != "small")
