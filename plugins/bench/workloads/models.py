"""Models to measure with: a GPT, a VGG, ResNets, many small layers, and emulated ones.

All are plain torch: small enough for one CPU core per rank, or made for a GPU that ranks share.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from bytesched.bench.profile import Profile
from bytesched.bench.specification import Specification
from bytesched.errors import ConfigError

from .emulated import EmulatedModel, emulated_loss

CLASSES: Final = 100
BATCHES: Final = 8


@dataclass(frozen=True)
class Workload:
    """A model and its loss: `loss(model, seed)` runs forward on the batch of that seed."""

    model: nn.Module
    loss: Callable[[nn.Module, int], Tensor]


class Block(nn.Module):
    """A transformer block: causal attention and an MLP, normalised before each."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens of the same shape."""
        batch, length, width = x.shape
        split = self.attention_in(self.attention_norm(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        y: Tensor = self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(x))))
        return x + y


class GPT(nn.Module):
    """A decoder-only transformer whose forward is its loss: a wrapper sees the whole of it."""

    def __init__(self, vocabulary: int, length: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean cross entropy of predicting each token from those before it."""
        seen = tokens[:, :-1]
        places = torch.arange(seen.shape[1], device=tokens.device)
        x = self.norm(self.blocks(self.tokens(seen) + self.positions(places)))
        return functional.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def vgg() -> nn.Sequential:
    """Convolutions in pairs, and fully connected layers that hold most of the bytes."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (16, 32, 64, 128):
        for _ in range(2):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.Linear(4 * channels, 4096), nn.ReLU()]
    layers += [nn.Linear(4096, 1536), nn.ReLU(), nn.Linear(1536, CLASSES)]
    return nn.Sequential(*layers)


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions around a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 4 * width, 1, bias=False),
            nn.BatchNorm2d(4 * width),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Four times `width` channels, `stride` times smaller."""
        return functional.relu(self.body(x) + self.shortcut(x))


class Residual(nn.Module):
    """A normalised layer around a shortcut: four small tensors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Values of the same shape."""
        return x + functional.gelu(self.linear(self.norm(x)))


def residuals(width: int, depth: int) -> nn.Sequential:
    """So many small tensors that the host decides how long an iteration takes."""
    layers = (Residual(width) for _ in range(depth))
    return nn.Sequential(nn.Linear(width, width), *layers, nn.Linear(width, CLASSES))


def resnet(
    stages: Sequence[tuple[int, int, int]], size: int, stride: int, *pool: nn.Module
) -> nn.Sequential:
    """Bottleneck blocks with batch normalisation behind a convolution: many small tensors.

    Of each stage, the width, how many blocks, and the stride of the first one.
    """
    channels = stages[0][0]
    convolution = nn.Conv2d(3, channels, size, stride, padding=size // 2, bias=False)
    layers = [convolution, nn.BatchNorm2d(channels), nn.ReLU(), *pool]
    for width, blocks, first in stages:
        for index in range(blocks):
            layers.append(Bottleneck(channels, width, first if index == 0 else 1))
            channels = 4 * width
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES)
    return nn.Sequential(*layers, *head)


_STAGES: Final = (32, 2, 1), (64, 3, 2), (128, 4, 2), (256, 3, 2)
#: of a ResNet-50
_STAGES_50: Final = (64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)


class Kind(NamedTuple):
    """A real model, and its batches."""

    make: Callable[[], nn.Module]
    #: how many samples a batch has by default, and the shape of each
    batch: tuple[int, ...]
    #: of tokens, of which a sample has one more than are predicted; 0: samples have classes
    vocabulary: int = 0
    #: whether what may be in bfloat16 is
    mixes: bool = False


REAL: Final = {
    "gpt": Kind(lambda: GPT(256, 64, width=320, depth=8, heads=5), (9, 65), 256),
    "vgg": Kind(vgg, (192, 3, 32, 32)),
    "resnet": Kind(lambda: resnet(_STAGES, 3, 1, nn.MaxPool2d(2)), (24, 3, 32, 32)),
}
#: of ranks that share a GPU: 98 M parameters, 24 M, and 148 tensors
ON_GPU: Final = {
    "gpt": Kind(lambda: GPT(8192, 1024, 768, 12, 12), (32, 1025), 8192, mixes=True),
    "conv": Kind(lambda: resnet(_STAGES_50, 7, 4), (64, 3, 224, 224), mixes=True),
    "small": Kind(lambda: residuals(256, 36), (64, 256)),
}
#: the same so small that a test trains them on a CPU
TINY: Final = {
    "gpt": Kind(lambda: GPT(64, 16, 32, 2, 2), (2, 17), 64),
    "conv": Kind(lambda: resnet([(4, 1, 1), (8, 1, 2)], 7, 4), (4, 3, 16, 16)),
    "small": Kind(lambda: residuals(16, 3), (4, 16)),
}
_KINDS: Final = {"": REAL, "cuda": ON_GPU, "cpu": TINY}


@lru_cache(maxsize=2 * BATCHES)
def _drawn(shape: tuple[int, ...], vocabulary: int, device: str, seed: int) -> tuple[Tensor, ...]:
    """A batch of tokens, or of samples and their classes."""
    generator = torch.Generator().manual_seed(seed)
    if vocabulary:
        return (torch.randint(vocabulary, shape, generator=generator).to(device),)
    samples = torch.randn(shape, generator=generator).to(device)
    return samples, torch.randint(CLASSES, shape[:1], generator=generator).to(device)


def build(spec: Specification, seed: int) -> Workload:
    """The workload of a bench specification, its weights drawn from `seed`."""
    if spec.profile is not None:
        return emulated(spec.profile, seed)
    device = "cuda" if spec.device == "cuda" else "cpu"
    return named(spec.model, spec.batch, seed, _KINDS[spec.device], device)


def named(
    model: str, batch: int, seed: int, kinds: Mapping[str, Kind] = REAL, device: str = "cpu"
) -> Workload:
    """One of ``kinds``, for a batch size or its own, or what ``module:function`` of a user returns.

    Raises `ConfigError` if there is no such function, or it returns something else.
    """
    torch.manual_seed(seed)
    if model not in kinds:
        return _user_workload(model)
    kind = kinds[model]
    shape = (batch or kind.batch[0], *kind.batch[1:])

    def loss(module: nn.Module, seed: int) -> Tensor:
        inputs = _drawn(shape, kind.vocabulary, device, seed % BATCHES)
        with torch.autocast(device, torch.bfloat16, enabled=kind.mixes):
            found: Tensor = module(inputs[0])
            return found if kind.vocabulary else functional.cross_entropy(found, inputs[1])

    with torch.device(device):
        return Workload(kind.make(), loss)


def emulated(profile: Profile, seed: int) -> Workload:
    """A profile's."""
    torch.manual_seed(seed)
    return Workload(EmulatedModel(profile), emulated_loss)


def _user_workload(target: str) -> Workload:
    module_name, _, function_name = target.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        made = getattr(importlib.import_module(module_name), function_name)()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--model {target}: {error}") from error
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise ConfigError(
            f"--model {target} returned {type(made).__name__}; expected a pair: the module, and "
            "a function loss(module, seed) that runs forward on a batch and returns its loss"
        )
    return Workload(*made)
