"""One block of `bytesched bench`: a new model trained with one system, every iteration timed.

And what the kernel tells: memory of this process, and time that the cores did not get.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

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
    is_on_gpu = next(workload.model.parameters()).is_cuda
    marks: list[Any] = []
    #: CPU time of the process, and of this thread
    clocks_s: list[tuple[float, float]] = []
    losses: list[Tensor] = []
    exchanged: dict[str, Any] = {}
    exchanges = running.exchanges
    for step in range(warmup + iterations + 1):
        if step == warmup and exchanges is not None:
            exchanges.clear()
        elif step == warmup + iterations and exchanges is not None:
            # What each took, and how long an iteration waited for them.
            exchanged["exchange_ms"] = [round(taken_ms, 2) for taken_ms in exchanges.taken_ms]
            exchanged["exchange_wait_ms"] = sum(exchanges.waited_ms) / iterations
        clocks_s.append((time.process_time(), time.thread_time()))
        marks.append(_mark(is_on_gpu=is_on_gpu))
        losses.append(iterate(workload, running, seed_of(step), clip))
    # Before the end, where a sharded optimizer gets the state of all ranks back.
    peak, state = peak_bytes(is_on_gpu=is_on_gpu), state_bytes(running.optimizer)
    figures = running.close() or {}
    values = [loss.item() for loss in losses]
    cpu_ms, main_cpu_ms = (
        1e3 * (after - before) / iterations
        for before, after in zip(clocks_s[warmup], clocks_s[-1], strict=True)
    )
    return {
        "iteration_ms": [round(_between_ms(*pair), 3) for pair in pairwise(marks[warmup:])],
        "cpu_ms": cpu_ms,
        "main_cpu_ms": main_cpu_ms,
        "peak_bytes": peak,
        "state_bytes": state,
        "losses": values,
        "weights": _digest(workload.model),
        "stats": figures,
        **exchanged,
    }


def iterate(workload: Workload, running: Running, seed: int, clip: float) -> Tensor:
    """One iteration of training, as a script has it; its loss."""
    running.optimizer.zero_grad()
    loss = workload.loss(running.module, seed)
    loss.backward()
    _step(running.optimizer, workload.model, clip)
    return loss.detach()


def _mark(*, is_on_gpu: bool) -> Any:
    """This moment: of the GPU if there is one, which is behind the host."""
    if not is_on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between_ms(one: Any, other: Any) -> float:
    """Of marks that are over."""
    took_ms: float = 1e3 * (other - one) if isinstance(one, float) else one.elapsed_time(other)
    return took_ms


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
        digest.update(whole.cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


_KIB = 1024


def reset_peak(*, is_on_gpu: bool = False) -> int:
    """Bytes that the process has in memory now; its peak counts from here on (Linux, proc(5)).

    Where the kernel does not allow that, the peak stays that of the process. On a GPU, of what
    torch has there, from which it lets go of what nobody uses.
    """
    if is_on_gpu:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    # What was freed would count as there, and be used again without counting.
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak_bytes(*, is_on_gpu: bool = False) -> int:
    """The most bytes that the process had in memory since `reset_peak`."""
    return torch.cuda.max_memory_allocated() if is_on_gpu else _status("VmHWM")


def state_bytes(optimizer: Any) -> int:
    """Bytes of the optimizer's state on this rank; of a sharded one, of the part that is here."""
    optimizer = getattr(optimizer, "optim", optimizer)
    return sum(
        getattr(tensor, "_local_tensor", tensor).nbytes
        for entry in dict.values(getattr(optimizer, "state", {}))
        for tensor in entry.values()
        if isinstance(tensor, torch.Tensor)
    )


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(_KIB * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


_STAT: Final = Path("/proc/stat")
#: of the columns of its first line (proc(5)); guest times, behind these, are in the first two
_COLUMNS: Final = 8
_IDLE, _WAITING, _STOLEN = 3, 4, 7


def core_times(stat: Path = _STAT) -> tuple[int, ...]:
    """What all cores did since they were started, in ticks; nothing where there is no /proc."""
    try:
        name, *ticks = stat.read_text().partition("\n")[0].split()
    except (OSError, ValueError):
        return ()
    return tuple(map(int, ticks[:_COLUMNS])) if name == "cpu" and len(ticks) >= _COLUMNS else ()


def stolen_share(before: Sequence[int], after: Sequence[int]) -> float:
    """Of the time in which the cores had something to do, what was stolen; 0 if it is unknown."""
    spent = [now - then for then, now in zip(before, after, strict=True)]
    busy = sum(spent) - spent[_IDLE] - spent[_WAITING] if spent else 0
    # Some kernels count backwards now and then.
    return max(0, spent[_STOLEN]) / busy if busy > 0 else 0.0
