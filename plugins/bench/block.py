"""One block of `bytesched bench`: a new model trained with one system, every iteration timed."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from torch import nn
from torch.nn.utils import clip_grad_norm_

from .machine import peak_bytes, state_bytes
from .systems.data_parallel import Running
from .workloads.models import Workload

SEED = 1


def train(
    workload: Workload,
    running: Running,
    warmup: int,
    iterations: int,
    seed_of: Callable[[int], int],
    clip: float = 0.0,
) -> dict[str, Any]:
    """Times of the iterations after `warmup`, and what this rank computed in all of them.

    An iteration is timed from its beginning to that of the next. `seed_of` says which batch an
    iteration trains on. With `clip`, gradients are clipped to that norm.
    """
    #: wall clock, CPU time of the process, and of this thread
    clocks_s: list[tuple[float, float, float]] = []
    losses: list[float] = []
    exchanged: dict[str, Any] = {}
    exchanges = running.exchanges
    for step in range(warmup + iterations + 1):
        if step == warmup and exchanges is not None:
            exchanges.clear()
        elif step == warmup + iterations and exchanges is not None:
            # What each took, and how long an iteration waited for them.
            exchanged["exchange_ms"] = [round(taken_ms, 2) for taken_ms in exchanges.taken_ms]
            exchanged["exchange_wait_ms"] = sum(exchanges.waited_ms) / iterations
        clocks_s.append((time.perf_counter(), time.process_time(), time.thread_time()))
        running.optimizer.zero_grad()
        loss = workload.loss(running.module, seed_of(step))
        loss.backward()
        _step(running.optimizer, workload.model, clip)
        losses.append(loss.item())
    # Before the end, where a sharded optimizer gets the state of all ranks back.
    peak, state = peak_bytes(), state_bytes(running.optimizer)
    figures = running.close()
    spans_s = [after[0] - before[0] for before, after in pairwise(clocks_s[warmup:])]
    cpu_ms, main_cpu_ms = (
        1e3 * (clocks_s[-1][n] - clocks_s[warmup][n]) / iterations for n in (1, 2)
    )
    return {
        "iteration_ms": [round(1e3 * span_s, 3) for span_s in spans_s],
        "cpu_ms": cpu_ms,
        "main_cpu_ms": main_cpu_ms,
        "peak_bytes": peak,
        "state_bytes": state,
        "losses": losses,
        "weights": _digest(workload.model),
        "stats": figures,
        **exchanged,
    }


def _step(optimizer: Any, model: nn.Module, clip: float) -> None:
    if not clip:
        optimizer.step()
        return
    if not hasattr(optimizer, "skip_synchronize"):
        clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        return
    # Horovod's gradients are averaged in step() otherwise.
    optimizer.synchronize()
    clip_grad_norm_(model.parameters(), clip)
    with optimizer.skip_synchronize():
        optimizer.step()


def _digest(model: nn.Module) -> str:
    """Hash of all weights, also of sharded ones; every rank takes part."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        weight: Any = parameter.detach()
        whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        digest.update(whole.numpy().tobytes())
    return digest.hexdigest()[:16]
