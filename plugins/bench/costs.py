"""What DDP and bytesched cost a processor here: small models are trained, and differences taken."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from typing import Any, Final

import torch

from bytesched.bench.profile import ELEMENT_BYTES, LayerProfile, Profile
from bytesched.link.fabric import MESSAGES_BY_ITSELF
from bytesched.sim.systems import CpuCosts

from .block import SEED, train
from .systems.data_parallel import MIB, Running, make_optimizer, set_up
from .workloads.models import emulated

__all__ = ["copy_bytes_per_s", "cpu_costs", "update_bytes_per_s"]

_WARMUP, _ITERATIONS = 3, 6
_OPTIMIZER: Final = "adamw"
_LAYERS, _TENSORS, _MANY_TENSORS = 8, 32, 160
_PIECES, _MANY_PIECES = 4, 32
_TRIES: Final = 5


@dataclass(frozen=True, slots=True)
class _Shape:
    """A model without compute, and in how many collectives it is sent."""

    tensors: int
    nbytes: int
    pieces: int


@dataclass(frozen=True, slots=True)
class _Used:
    """CPU time of an iteration, and of it that of the thread that trains."""

    all_s: float
    main_s: float
    collectives: int


def cpu_costs(kind: str, nbytes: int, messages: int) -> CpuCosts:
    """CPU time of one system on this rank; collective.

    A model is trained as it is, in more collectives, with more tensors and with more bytes, and
    what that costs without any communication is taken away.

    Args:
        kind: "ddp" or "bytesched".
        nbytes: of the smaller models.
        messages: of an all-reduce.
    """
    base = _Shape(_TENSORS, nbytes, _PIECES)
    pieces = _Shape(_TENSORS, nbytes, _MANY_PIECES)
    tensors = _Shape(_MANY_TENSORS, nbytes, _PIECES)
    more = _Shape(_TENSORS, 2 * nbytes, _PIECES)
    plain = {shape: _used("plain", shape) for shape in (base, tensors, more)}
    used = {shape: _used(kind, shape) for shape in (base, pieces, tensors, more)}
    collective_s = (used[pieces].all_s - used[base].all_s) / (
        used[pieces].collectives - used[base].collectives
    )
    tensor_s = used[tensors].main_s - used[base].main_s
    tensor_s -= plain[tensors].main_s - plain[base].main_s
    byte_s = used[more].all_s - used[base].all_s - (plain[more].all_s - plain[base].all_s)
    return CpuCosts(
        message_s=max(0.0, collective_s / (messages + MESSAGES_BY_ITSELF)),
        tensor_s=max(0.0, tensor_s / (_MANY_TENSORS - _TENSORS)),
        byte_s=max(0.0, byte_s / nbytes),
    )


def _used(kind: str, shape: _Shape) -> _Used:
    workload = emulated(_profile(shape), SEED)
    if kind == "plain":
        running = Running(workload.model, make_optimizer(_OPTIMIZER, workload.model.parameters()))
    else:
        running = set_up(kind, _options(kind, shape), workload.model, _OPTIMIZER)
    found = train(
        workload, running, warmup=_WARMUP, iterations=_ITERATIONS, seed_of=lambda step: step
    )
    del workload, running
    gc.collect()
    collectives = int(found["stats"].get("chunks", shape.pieces))
    return _Used(found["cpu_ms"] / 1e3, found["main_cpu_ms"] / 1e3, collectives)


def _profile(shape: _Shape) -> Profile:
    elements = shape.nbytes // ELEMENT_BYTES // shape.tensors
    layer = LayerProfile("layer", 0.0, 0.0, ((elements,),) * (shape.tensors // _LAYERS))
    # No profile may take no time at all.
    last = LayerProfile("last", 1e-3, 0.0, ())
    return Profile("costs", "", (*(layer,) * _LAYERS, last))


def _options(kind: str, shape: _Shape) -> dict[str, str]:
    piece_bytes = shape.nbytes // shape.pieces
    if kind == "ddp":
        return {"bucket_mb": str(piece_bytes / MIB), "bucket_view": "1"}
    return {"partition_bytes": str(piece_bytes), "credit_bytes": str(2 * piece_bytes)}


def update_bytes_per_s(nbytes: int) -> float:
    """Bytes of gradients that the optimizer applies in a second of CPU time."""
    parameter = torch.nn.Parameter(torch.zeros(nbytes // ELEMENT_BYTES))
    parameter.grad = torch.ones_like(parameter)
    return nbytes / _least_cpu_s(make_optimizer(_OPTIMIZER, [parameter]).step)


def copy_bytes_per_s(nbytes: int) -> float:
    """Bytes that are copied in a second of CPU time."""
    source, target = (torch.ones(nbytes // ELEMENT_BYTES) for _ in range(2))
    return nbytes / _least_cpu_s(lambda: target.copy_(source))


def _least_cpu_s(call: Any) -> float:
    took_s = []
    for _ in range(_TRIES + 1):
        began_s = time.thread_time()
        call()
        took_s.append(time.thread_time() - began_s)
    return max(min(took_s[1:]), 1e-9)
