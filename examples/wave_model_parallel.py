"""A model that no rank holds as a whole: its stages visit every rank, which keeps its batch.

torchrun --nproc-per-node 4 examples/wave_model_parallel.py
"""

import torch
import torch.distributed as dist
from torch import nn

from bytesched.plugins.wave import ModelWaves


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(16)]
    model = nn.Sequential(*layers, nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    torch.manual_seed(dist.get_rank())
    inputs, targets = torch.randn(32, 256), torch.randint(10, (32,))
    waves = ModelWaves(model, optimizer, nn.functional.cross_entropy, inputs)
    for _ in range(20):
        loss = waves.step(inputs, targets)

    weights = waves.state_dict()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.10f}, {len(weights)} tensors to save")
        for name, value in waves.stats().items():
            print(f"  {name} = {value}")
    waves.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
