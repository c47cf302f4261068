"""A small GPT in a pipeline of two ranks, on the Python sources of the standard library.

bytesched pipeline plan --profile gpt --ranks 2 --split-backward -o order.csv
torchrun --nproc-per-node 4 examples/pipeline_gpt.py --order order.csv  # two replicas
torchrun --nproc-per-node 4 examples/pipeline_gpt.py                    # torch's own ZB-V
torchrun --nproc-per-node 4 examples/pipeline_gpt.py --plain            # no wrap: the same losses
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble
from torch.nn import functional

import bytesched
from bytesched.plugins.demo.model import LENGTH, sample, source_tokens
from bytesched.plugins.pipelines import ordered_schedule

WIDTH, HEADS = 64, 4
MICRO_BATCHES = 8
#: in the shape of a V: the rank of each stage
RANKS = (0, 1, 1, 0)


class Block(nn.Module):
    """Causal attention, and a layer of its own for every place."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y: Tensor = self.down(functional.gelu(self.up(self.norms[1](x))))
        return x + y


class Embedding(nn.Module):
    """What the first stage begins with."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, text: Tensor) -> Tensor:
        x: Tensor = self.bytes(text) + self.places.weight
        return x


def stage_of(number: int) -> nn.Module:
    """The same on all ranks, as its weights depend on its number alone."""
    torch.manual_seed(number)
    layers: list[nn.Module] = [Block()]
    if number == 0:
        layers.insert(0, Embedding())
    if number == len(RANKS) - 1:
        layers += [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)]
    return nn.Sequential(*layers)


def loss_of(output: Tensor, following: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), following.flatten())


def train(options: argparse.Namespace) -> None:
    pipelines = dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", (pipelines, 2), mesh_dim_names=("replica", "pipeline"))
    pipeline, replicas = mesh["pipeline"].get_group(), mesh["replica"].get_group()
    place = dist.get_rank(pipeline)
    mine = [number for number, rank in enumerate(RANKS) if rank == place]
    modules = [stage_of(number) for number in mine]
    stages: list[Any] = [
        PipelineStage(module, number, len(RANKS), torch.device("cpu"), group=pipeline)
        for number, module in zip(mine, modules, strict=True)
    ]
    if options.order:
        schedule = ordered_schedule(stages, options.order, loss_of)
    else:
        schedule = ScheduleZBVZeroBubble(stages, MICRO_BATCHES, loss_fn=loss_of)
    parameters = [parameter for module in modules for parameter in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    if not options.plain:
        optimizer = bytesched.wrap(optimizer, schedule)

    text = source_tokens()
    torch.manual_seed(dist.get_rank(replicas))
    means = []
    for step in range(options.steps):
        optimizer.zero_grad()
        texts = sample(text, options.batch, step)
        losses: list[Tensor] = []
        # A V begins and ends on its first rank.
        ends = {"target": texts[:, 1:], "losses": losses} if place == 0 else {}
        # Before 2.13, torch compares strides with those that it has inferred.
        schedule.step(*([texts[:, :-1].contiguous()] if place == 0 else []), **ends)
        if options.plain:
            for parameter in parameters:
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad, group=replicas)
                parameter.grad.div_(pipelines)
        optimizer.step()
        if place == 0:
            mean = torch.stack(losses).mean().detach() / pipelines
            dist.all_reduce(mean, group=replicas)
            means.append(mean.item())
            if dist.get_rank() == 0 and (step % 5 == 4 or step == options.steps - 1):
                print(f"step {step + 1} loss {means[-1]:.10f}", flush=True)
    if not options.plain:
        bytesched.unwrap(optimizer)
    if dist.get_rank() == 0 and options.json:
        options.json.write_text(json.dumps(means))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--order", type=Path, help="of bytesched pipeline plan, for two ranks")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=16, help="texts of each pipeline")
    parser.add_argument("--plain", action="store_true", help="without bytesched.wrap")
    parser.add_argument("--json", type=Path, help="write the loss of each step to this file")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    train(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
