"""A small GPT with mixture-of-experts layers, on the Python sources of the standard library.

torchrun --nproc-per-node 2 examples/moe_gpt.py --gate dts
torchrun --nproc-per-node 4 examples/moe_gpt.py --expert-ranks 2   # two replicas of each expert
torchrun --nproc-per-node 2 examples/moe_gpt.py --plain            # without wrap: the same losses
torchrun --nproc-per-node 2 examples/moe_gpt.py --no-lane          # gradients do not make way
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import bytesched
from bytesched.plugins import moe
from bytesched.plugins.demo.model import LENGTH, sample, source_tokens

WIDTH, HEADS, DEPTH = 128, 4, 2


class Block(nn.Module):
    """Causal attention, then experts."""

    def __init__(self, experts: moe.MoE) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        experts: Tensor = self.experts(self.norms[1](x))
        return x + experts


class GPT(nn.Module):
    """Its forward pass is the loss: of the next byte, and a little of the gates'."""

    def __init__(self, blocks: list[Block]) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, text: Tensor) -> tuple[Tensor, Tensor]:
        x = self.bytes(text[:, :-1]) + self.places.weight
        for block in self.blocks:
            x = block(x)
        loss = functional.cross_entropy(self.head(x).flatten(0, 1), text[:, 1:].flatten())
        layers = [layer for layer in self.modules() if isinstance(layer, moe.MoE)]
        balance = torch.stack([layer.auxiliary_loss for layer in layers]).mean()
        return loss, 0.01 * balance


def gate_of(options: argparse.Namespace) -> moe.TopKGate | moe.DTSGate:
    if options.gate == "dts":
        # All experts at first, and one from the middle of the training on.
        falls = moe.Temperature(max(options.steps // 2, 1))
        return moe.DTSGate(WIDTH, options.experts, falls, hard_after=options.steps // 2)
    return moe.TopKGate(WIDTH, options.experts, k=int(options.gate[-1]))


def block_of(number: int, options: argparse.Namespace, grid: moe.Grid) -> Block:
    experts = []
    for expert in moe.own_experts(options.experts, grid.expert_parallel):
        # An expert begins alike, whichever rank has it.
        torch.manual_seed(1000 * number + expert)
        layers = (nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        experts.append(nn.Sequential(*layers))
    torch.manual_seed(number)
    layer = moe.MoE(
        gate_of(options),
        experts,
        grid.expert_parallel,
        grid.data_parallel,
        is_urgent=not options.no_lane,
    )
    return Block(layer)


def train(options: argparse.Namespace) -> None:
    grid = moe.expert_groups(options.expert_ranks or dist.get_world_size())
    blocks = [block_of(number, options, grid) for number in range(DEPTH)]
    model = moe.data_parallel(GPT(blocks))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if not options.plain:
        optimizer = bytesched.wrap(optimizer, model)

    text = source_tokens()
    # The noise of gates is every rank's own.
    torch.manual_seed(dist.get_rank())
    steps = []
    began_s = time.perf_counter()
    for step in range(options.steps):
        optimizer.zero_grad()
        loss, balance = model(sample(text, options.batch, step))
        (loss + balance).backward()
        if options.plain:
            moe.reduce_expert_gradients(model)
        optimizer.step()
        layer = blocks[0].experts
        for gate in model.modules():
            if isinstance(gate, moe.DTSGate):
                gate.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        mean = total.item() / dist.get_world_size()
        seconds = time.perf_counter() - began_s
        steps.append(
            {"loss": mean, "seconds": seconds, "experts": layer.kept, "pieces": layer.pieces}
        )
        if dist.get_rank() == 0 and (step % 10 == 9 or step == options.steps - 1):
            print(
                f"step {step + 1} loss {mean:.10f} after {seconds:.1f} s, "
                f"{layer.kept:.1f} experts a token in {layer.pieces} pieces",
                flush=True,
            )
    if not options.plain:
        bytesched.unwrap(optimizer)
    if dist.get_rank() == 0 and options.json:
        options.json.write_text(json.dumps({"gate": options.gate, "steps": steps}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--expert-ranks", type=int, help="ranks that share all experts out; all")
    parser.add_argument("--gate", choices=["top1", "top2", "dts"], default="top1")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=8, help="texts of each rank")
    parser.add_argument("--plain", action="store_true", help="without bytesched.wrap")
    parser.add_argument("--no-lane", action="store_true", help="gradients do not make way")
    parser.add_argument("--json", type=Path, help="where to write losses and times")
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    train(parser.parse_args())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
