"""Gates: which experts see a token, and with which weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from bytesched.errors import ConfigError


@dataclass(frozen=True)
class Temperature:
    """A temperature that falls from ``first`` to ``last`` within ``steps`` steps, and stays there.

    Exponential: ``max(first * exp(step * ln(last / first) / steps), last)``. Linear:
    ``max(first - step * (first - last) / steps, last)``. Both are EvoMoE's, as are 1.0 and 0.5.
    """

    steps: int
    first: float = 1.0
    last: float = 0.5
    is_linear: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1 or not 0 < self.last <= self.first:
            raise ConfigError(f"{self!r}: steps must be positive, and first >= last > 0")

    def at(self, step: int) -> float:
        """The temperature of a step; they count from 0."""
        share = step / self.steps
        if self.is_linear:
            return max(self.first - share * (self.first - self.last), self.last)
        return max(self.first * math.exp(share * math.log(self.last / self.first)), self.last)


class Routing(NamedTuple):
    """What a gate says of its tokens, one row each, over all experts."""

    #: what the outputs of experts are multiplied by; 0 where they are not asked
    weight: Tensor
    #: which experts are asked
    keep: Tensor
    #: to be added to the loss, times a small factor: small where experts have equal loads
    auxiliary_loss: Tensor


class TopKGate(nn.Module):
    """The ``k`` experts with the largest probabilities.

    ``p = softmax(x W)``; the weights are p where kept, for k > 1 divided by their sum, as in GShard
    (Lepikhin et al., 2021). ``auxiliary_loss = E * sum_e(mean_tokens(p) * share of tokens)`` as in
    Switch Transformers (Fedus et al., 2022).
    """

    def __init__(self, width: int, experts: int, k: int = 1) -> None:
        if not 1 <= k <= experts:
            raise ConfigError(f"k must be from 1 to {experts}, the experts; it is {k}")
        super().__init__()
        self.experts = experts
        self.k = k
        self.scores = nn.Linear(width, experts, bias=False)

    def forward(self, x: Tensor) -> Routing:
        """The routing of tokens, one row each."""
        p = self.scores(x).softmax(dim=-1)
        keep = _one_hot(p.topk(self.k, dim=-1).indices, self.experts)
        weight = p * keep
        if self.k > 1:
            weight = weight / weight.sum(dim=-1, keepdim=True)
        load = _mean(keep.to(p.dtype)) / self.k
        return Routing(weight, keep, self.experts * (_mean(p) * load).sum())


class DTSGate(nn.Module):
    """Dense to sparse: all experts above a threshold, of which fewer remain as a temperature falls.

    ::

        g = gumbel_softmax(x W, tau);  keep = g > threshold;  weight = keep * g
        auxiliary_loss = E^2 * mean_e(mean_tokens(weight) * mean_tokens(keep))

    ``tau`` falls as `Temperature` says; after ``hard_after`` steps ``keep = one-hot(argmax g)``.
    From EvoMoE (Nie et al., arXiv 2112.14397), with the gate and the threshold of 0.001 of its
    published code. That code evaluates top-1; here the weight is ``softmax(x W / tau)`` then,
    without noise. A token always keeps its best expert.

    At the default end of the temperature a token still has 10 of 16 equal experts, so it is
    ``hard_after`` that ends dense training.

    Args:
        width: of a token.
        experts: how many there are, on all ranks together.
        temperature: over which steps, from what to what.
        hard_after: steps after which one expert is kept; None for never.
    """

    steps_done: Tensor

    def __init__(
        self,
        width: int,
        experts: int,
        temperature: Temperature,
        *,
        hard_after: int | None = None,
        threshold: float = 0.001,
    ) -> None:
        super().__init__()
        self.experts = experts
        self.temperature = temperature
        self.hard_after = hard_after
        self.threshold = threshold
        self.scores = nn.Linear(width, experts, bias=False)
        self.register_buffer("steps_done", torch.zeros((), dtype=torch.int64))

    @property
    def tau(self) -> float:
        """The temperature now."""
        return self.temperature.at(int(self.steps_done))

    @property
    def is_hard(self) -> bool:
        """Whether one expert is kept for each token."""
        done = int(self.steps_done)
        return not self.training or (self.hard_after is not None and done >= self.hard_after)

    def step(self) -> None:
        """Counts one step of training; to be called after each ``optimizer.step()``.

        Forward passes are not counted: gradients may be accumulated over several of them, and
        checkpointing repeats them.
        """
        self.steps_done += 1

    def forward(self, x: Tensor) -> Routing:
        """The routing of tokens, one row each."""
        scores = self.scores(x)
        if self.training:
            # In float32 at least: noise of a 16-bit type is too coarse.
            wide = scores if scores.dtype is torch.float64 else scores.float()
            g = functional.gumbel_softmax(wide, tau=self.tau).to(scores.dtype)
        else:
            g = (scores / self.tau).softmax(dim=-1)
        best = _one_hot(g.argmax(dim=-1, keepdim=True), self.experts)
        keep = best if self.is_hard else (g > self.threshold) | best
        weight = g * keep
        loads = _mean(weight) * _mean(keep.to(g.dtype))
        return Routing(weight, keep, self.experts**2 * loads.mean())

    def extra_repr(self) -> str:
        state = "hard" if self.is_hard else f"tau {self.tau:.3f}"
        return f"{state}, {int(self.steps_done)} steps done"


def _one_hot(index: Tensor, experts: int) -> Tensor:
    """Where each row's indices are."""
    keep = torch.zeros(len(index), experts, dtype=torch.bool, device=index.device)
    return keep.scatter_(1, index, True)


def _mean(rows: Tensor) -> Tensor:
    """The mean row; zeros if there is none, as for a rank without tokens."""
    return rows.sum(dim=0) / max(len(rows), 1)
