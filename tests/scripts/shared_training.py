"""A training script that knows nothing of bytesched; it prints what it has come to."""

from __future__ import annotations

import hashlib
import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 12


def main(device: str = "cpu") -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4)).to(device)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
        inputs = torch.randn(4, 8, generator=generator).to(device)
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        print(f"step {step}", flush=True)
        if step % 4 == 3:
            model.eval()
            with torch.no_grad():
                losses.append(model(inputs).sum().item())
            model.train()
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.cpu().numpy().tobytes())
    figures = _figures()
    dist.destroy_process_group()
    print(json.dumps({"losses": losses, "weights": digest.hexdigest(), **figures}))


def _figures() -> dict[str, object]:
    """Of bytesched, if it is here; the script itself does not import it."""
    ours = sys.modules.get("bytesched")
    if ours is None:
        return {}
    figures = ours.stats()
    return {name: figures[name] for name in ("turns", "turns_ended", "turn_wait_s", "mode")}


if __name__ == "__main__":
    main(*sys.argv[1:])
