"""A rank on a CUDA device that is killed or stopped at an exact moment, and what the other says."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from gpu_comparing import DEVICE
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from training import SMALL, adamw, mlp

import bytesched

#: in which rank 1 falls
FAULT_STEP = 4


def trains_until(moment: str, number: int, fields: dict[str, Any]) -> None:
    """Rank 1 gets the signal ``number`` at ``moment``; rank 0 says which error it gets.

    Then it ends rank 1, which may be stopped.
    """
    pids = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    torch.manual_seed(3)
    inner = mlp().to(DEVICE)
    model = DistributedDataParallel(inner)
    optimizer = adamw(model)
    bytesched.wrap(optimizer, model, **{**SMALL, **fields})
    now = {"step": 0}

    def at(passed: str) -> None:
        if (passed, now["step"], dist.get_rank()) == (moment, FAULT_STEP, 1):
            # What is queued on the device has no part in it.
            os.kill(os.getpid(), number)

    def forward_hook(_: Any, __: Any, output: Tensor) -> None:
        at("in forward")
        if output.requires_grad:
            output.register_hook(lambda _: at("in backward"))

    inner[2].register_forward_hook(forward_hook)
    try:
        for now["step"] in range(2 * FAULT_STEP):
            optimizer.zero_grad()
            model(torch.ones(4, 8, device=DEVICE)).square().mean().backward()
            at("after backward")
            optimizer.step()
            at("after step")
        bytesched.flush()
    except bytesched.BytesschedError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        if dist.get_rank() == 0:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[1], signal.SIGKILL)
        raise
