"""Models to measure with: a small GPT, a VGG-like, a ResNet-like, and emulated ones.

All are plain torch and small enough for one CPU core per rank.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from bytesched.bench.profile import Profile
from bytesched.bench.specification import Specification
from bytesched.errors import ConfigError

from .emulated import EmulatedModel, emulated_loss

IMAGE_SIZE = 32
CLASSES = 100
VOCABULARY = 256
LENGTH = 64
BATCHES = 8


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
    features = channels * (IMAGE_SIZE // 16) ** 2
    layers += [nn.Flatten(), nn.Linear(features, 4096), nn.ReLU()]
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


def resnet() -> nn.Sequential:
    """Bottleneck blocks with batch normalisation: many small tensors."""
    stages = ((32, 2, 1), (64, 3, 2), (128, 4, 2), (256, 3, 2))
    before = nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()
    return nn.Sequential(*before, nn.MaxPool2d(2), *bottlenecks(32, stages))


def bottlenecks(channels: int, stages: Iterable[tuple[int, int, int]]) -> list[nn.Module]:
    """Stages of blocks, each with a width, how many, and the first one's stride; and a head."""
    layers: list[nn.Module] = []
    for width, blocks, stride in stages:
        for index in range(blocks):
            layers.append(Bottleneck(channels, width, stride if index == 0 else 1))
            channels = 4 * width
    return [*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES)]


@lru_cache(maxsize=2 * BATCHES)
def _drawn(batch: int, seed: int, *, of_images: bool) -> tuple[Tensor, ...]:
    """A batch of tokens, or of images and their labels."""
    generator = torch.Generator().manual_seed(seed)
    if not of_images:
        return (torch.randint(VOCABULARY, (batch, LENGTH + 1), generator=generator),)
    images = torch.randn(batch, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
    return images, torch.randint(CLASSES, (batch,), generator=generator)


def _gpt(batch: int) -> Workload:
    def loss(module: nn.Module, seed: int) -> Tensor:
        return module(*_drawn(batch, seed % BATCHES, of_images=False))  # type: ignore[no-any-return]

    return Workload(GPT(VOCABULARY, LENGTH, width=320, depth=8, heads=5), loss)


def _of_images(model: nn.Module, batch: int) -> Workload:
    def loss(module: nn.Module, seed: int) -> Tensor:
        images, labels = _drawn(batch, seed % BATCHES, of_images=True)
        return functional.cross_entropy(module(images), labels)

    return Workload(model, loss)


#: Each real model by name: how to build it for a batch size, and the batch size by default.
REAL: dict[str, tuple[Callable[[int], Workload], int]] = {
    "gpt": (_gpt, 9),
    "vgg": (lambda batch: _of_images(vgg(), batch), 192),
    "resnet": (lambda batch: _of_images(resnet(), batch), 24),
}


def build(spec: Specification, seed: int) -> Workload:
    """The workload of a bench specification, its weights drawn from `seed`."""
    if spec.profile is not None:
        return emulated(spec.profile, seed)
    return named(spec.model, spec.batch, seed)


def named(model: str, batch: int, seed: int) -> Workload:
    """One of `REAL`, for a batch size or its own, or what ``module:function`` of a user returns."""
    torch.manual_seed(seed)
    if model in REAL:
        make, default_batch = REAL[model]
        return make(batch or default_batch)
    return _user_workload(model)


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
