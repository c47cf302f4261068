"""One rank of the demo: trains a character GPT on the sources of the standard library.

Reports to the demo in lines of JSON on standard output, from rank 0.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
import sysconfig
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bytesched.plugins.bench_models import GPT, NextToken
from bytesched.plugins.systems import Running, set_up
from bytesched.plugins.traced_ddp import trace_ddp

LENGTH = 64
TEXT_BYTES = 4 << 20
TRACED_STEPS = 8
WARMUP_STEPS = 5
SMOOTHED = 10
LARGEST_BATCH = 64
PROBE_BATCH = 4


def main(argv: list[str]) -> int:
    """Train as the specification, a JSON argument, says."""
    spec = json.loads(argv[0])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    torch.manual_seed(1)
    text = torch.frombuffer(bytearray(source_text()), dtype=torch.uint8).long()
    model = NextToken(GPT(256, LENGTH, width=256, depth=6, heads=4))
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    batch = spec["batch"] or choose_batch(copy.deepcopy(model), text, nbytes)
    tell({"batch": batch, "model_bytes": nbytes})

    def loss_of(module: nn.Module, step: int) -> Tensor:
        return module(sample(text, batch, step))  # type: ignore[no-any-return]

    traced = copy.deepcopy(model)
    running = set_up(spec["kind"], spec["options"], model, "adamw")
    times_ms, losses = train(running, loss_of, spec["iterations"])
    figures = running.close()
    trace(spec, traced, loss_of)
    everyone: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, losses)
    tell({"times_ms": times_ms[WARMUP_STEPS:], "losses": everyone, "stats": figures})
    dist.barrier()
    dist.destroy_process_group()
    return 0


def train(running: Running, loss_of: Any, iterations: int) -> tuple[list[float], list[float]]:
    """Milliseconds from the start of each iteration to the next, and the losses."""
    times_ms: list[float] = []
    losses: list[float] = []
    start_s = time.perf_counter()
    for step in range(iterations):
        running.optimizer.zero_grad()
        loss = loss_of(running.module, step)
        loss.backward()
        running.optimizer.step()
        losses.append(loss.item())
        now_s = time.perf_counter()
        times_ms.append(1e3 * (now_s - start_s))
        start_s = now_s
        recent = statistics.fmean(losses[-SMOOTHED:])
        tell({"step": step + 1, "loss": recent, "ms": statistics.median(times_ms[-SMOOTHED:])})
    return times_ms, losses


def trace(spec: dict[str, Any], model: nn.Module, loss_of: Any) -> None:
    """Some more iterations from the start, this time with a timeline, apart from the timing."""
    if spec["kind"] == "bytesched":
        options = spec["options"] | {"timeline": spec["trace_folder"]}
        running = set_up("bytesched", options, model, "adamw")
        train(running, loss_of, 2 * TRACED_STEPS)
        running.close()
    elif spec["trace_folder"]:
        running = set_up("ddp", spec["options"], model, "adamw")
        trace_ddp(
            running.module,  # type: ignore[arg-type]
            running.optimizer,
            loss_of,
            steps=TRACED_STEPS,
            folder=spec["trace_folder"],
        )


def choose_batch(model: nn.Module, text: Tensor, nbytes: int) -> int:
    """The batch whose computation takes about as long as sending the gradients."""
    buffer = torch.zeros(nbytes // 4)
    dist.all_reduce(buffer)
    sending_s, computing_s = [], []
    for step in range(4):
        dist.barrier()
        start_s = time.perf_counter()
        dist.all_reduce(buffer)
        sending_s.append(time.perf_counter() - start_s)
        start_s = time.perf_counter()
        model(sample(text, PROBE_BATCH, step)).backward()
        computing_s.append(time.perf_counter() - start_s)
    batch = PROBE_BATCH * min(sending_s) / min(computing_s[1:])
    agreed = torch.tensor(batch)
    dist.broadcast(agreed, 0)
    return max(2, min(LARGEST_BATCH, round(float(agreed))))


def sample(text: Tensor, batch: int, step: int) -> Tensor:
    """This rank's batch of that step: pieces of the text."""
    seed = step * dist.get_world_size() + dist.get_rank()
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - LENGTH - 1, (batch, 1), generator=generator)
    return text[starts + torch.arange(LENGTH + 1)]


def source_text() -> bytes:
    """The Python sources of this machine's standard library, up to some megabytes."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) > TEXT_BYTES:
            break
    return bytes(text)


def tell(message: dict[str, Any]) -> None:
    """Send one message to the demo."""
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
