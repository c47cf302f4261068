"""Plans of tensor parallelism as torch runs them: the losses of one process."""

from __future__ import annotations

import torch
import torch.distributed as dist
from planned_layers import BLOCKS, LINK, MODELS, WIDTH, planned
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional

from bytesched.ir.check import check
from bytesched.ir.lower import tensor_plan
from bytesched.plugins.parallel import parallel_styles

STEPS, BATCH, LENGTH, WORDS = 4, 16, 4, 12
HEADS = 2


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.act = nn.GELU()
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.act(self.up(x)))
        return y


class Block(nn.Module):
    """A layer of a transformer; its number of heads is what it finds, of their fixed width."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        q, k, v = (
            each(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        y: Tensor = x + self.down(functional.gelu(self.up(self.norm_2(x))))
        return y


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "mlp":
        return nn.Sequential(*(Perceptron() for _ in range(BLOCKS))).double()
    blocks = (Block() for _ in range(BLOCKS - 2))
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.Linear(WIDTH, WORDS)).double()


def batch_of(name: str, step: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(100 + step)
    if name == "mlp":
        x, y = torch.randn(2, BATCH, WIDTH, dtype=torch.float64).unbind()
    else:
        x, y = torch.randint(WORDS, (2, BATCH, LENGTH)).unbind()
    return x, y


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    if target.is_floating_point():
        return functional.mse_loss(output, target)
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def trained(name: str, model: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        x, y = batch_of(name, step)
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def losses() -> dict[str, list[float]]:
    """How far losses of both models' tensor plans are from those of one process, relatively.

    In one case, as DTensor remembers the groups of equal meshes, which end with a case.
    """
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    found = {}
    for name in MODELS:
        program, _ = planned(name, "tp", ranks)
        check(program, LINK)
        model = model_of(name)
        parallelize_module(model, mesh, parallel_styles(tensor_plan(program)))
        pairs = zip(trained(name, model), trained(name, model_of(name)), strict=True)
        found[name] = [abs(one / other - 1) for one, other in pairs]
    return found


def test_losses_are_those_of_one_process(two_ranks: Ranks) -> None:
    for found in two_ranks.run(losses):
        assert set(found) == {"mlp", "transformer"}
        for far in found.values():
            assert len(far) == STEPS
            assert max(far) < 1e-12
