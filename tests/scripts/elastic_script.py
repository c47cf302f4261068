"""Trains elastically through Horovod; the rank on the second host kills itself once.

Its argument is a folder for the mark of the kill. Every rank has the same data, so that the number
of ranks changes no average beyond rounding.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

import bytesched

KILLED_AT = 12
AFTER_REGROWTH = 10
#: far more steps than any machine does until the host is taken back
LIMIT = 100_000
PACE_S = 0.02

hvd.init()
torch.manual_seed(1)
model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(5)], torch.nn.Linear(32, 4))
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
    named_parameters=model.named_parameters(),
)
bytesched.wrap(optimizer, model, partition_bytes=2048, credit_bytes=4096, timeout_s=10)
killed = Path(sys.argv[1]) / "killed"
sizes: list[tuple[int, str]] = []


@hvd.elastic.run  # type: ignore[untyped-decorator]
def train(state: Any) -> None:
    while state.batch < state.end:
        generator = torch.Generator().manual_seed(state.batch)
        loss = model(torch.randn(8, 32, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        second_host = os.environ["HOROVOD_HOSTNAME"] == "127.0.0.1"
        if state.batch == KILLED_AT and second_host and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        state.batch += 1
        seen = (hvd.size(), str(bytesched.stats(optimizer)["mode"]))
        if not sizes or sizes[-1] != seen:
            sizes.append(seen)
        if hvd.size() == 3 and killed.exists() and state.end == LIMIT and state.batch > KILLED_AT:
            state.end = state.batch + AFTER_REGROWTH
        if state.batch % 5 == 0 or state.batch == state.end:
            time.sleep(PACE_S)
            state.commit()


state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0, end=LIMIT)
train(state)
weights = torch.cat([p.detach().flatten() for p in model.parameters()])
print(
    json.dumps({"sizes": sizes, "batch": state.batch, "weights": weights[::97].tolist()}),
    flush=True,
)
