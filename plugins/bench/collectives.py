"""One rank that measures for `bytesched sim --measure`: ``python -m ... PROBES PLACE``."""

from __future__ import annotations

import gc
import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from bytesched.bench.profile import ELEMENT_BYTES, LayerProfile, Profile
from bytesched.lab.ranks import Place
from bytesched.link.fabric import ALGORITHMS, MESSAGES_BY_ITSELF
from bytesched.sim.measure import Measured, Probes
from bytesched.sim.systems import CpuCosts

from .block import SEED, train
from .link import all_reduces_s
from .rank import Ranks, run_rank
from .systems.data_parallel import MIB, Running, make_optimizer, set_up
from .workloads.models import emulated

#: of gradients that are updated and copied: more than caches hold
_BULK_BYTES = 64 << 20
#: what ranks that share cores have in common, whatever their hosts are called
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def _measure(probes: Probes, _: Place) -> dict[str, Any]:
    ranks = Ranks()
    own_s = [min(all_reduces_s(size, probes.tries)) for size in probes.sizes_bytes]
    seconds = tuple(map(max, zip(*ranks.gather(own_s), strict=True)))
    nbytes = min(probes.cost_bytes, int(probes.sizes_bytes[-1] / seconds[-1] * probes.cost_s))
    messages = ALGORITHMS["ring"].messages(ranks.size)
    costs = (asdict(cpu_costs(kind, nbytes, messages)) for kind in ("ddp", "bytesched"))
    plain, scheduled = (
        CpuCosts(**dict(zip(cost, ranks.means(list(cost.values())), strict=True))) for cost in costs
    )
    parameter = torch.nn.Parameter(torch.zeros(_BULK_BYTES // ELEMENT_BYTES))
    parameter.grad = source = torch.ones_like(parameter)
    updated = _bytes_per_s(make_optimizer([parameter]).step)
    copied = _bytes_per_s(lambda: parameter.detach().copy_(source))
    update, copy = ranks.means([updated, copied])
    measured = Measured(
        ranks=ranks.size,
        sizes_bytes=probes.sizes_bytes,
        seconds=seconds,
        cores_per_rank=_cores_per_rank(ranks),
        update_bytes_per_s=update,
        copy_bytes_per_s=copy,
        plain=plain,
        scheduled=scheduled,
    )
    return asdict(measured)


def _cores_per_rank(ranks: Ranks) -> float:
    """Of the ranks on this machine, each of which may be bound to cores of its own."""
    here = _BOOT.read_text() if _BOOT.exists() else socket.gethostname()
    found = ranks.gather((here, os.sched_getaffinity(0)))
    of_ranks = [cores for machine, cores in found if machine == here]
    return len(frozenset().union(*of_ranks)) / len(of_ranks)


_WARMUP, _ITERATIONS = 3, 6
_LAYERS, _TENSORS, _MANY_TENSORS = 8, 32, 160
_PIECES, _MANY_PIECES = 4, 32
_TRIES: Final = 5


class _Shape(NamedTuple):
    """A model without compute, and in how many collectives it is sent."""

    tensors: int
    nbytes: int
    pieces: int


class _Used(NamedTuple):
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
    pieces, tensors = base._replace(pieces=_MANY_PIECES), base._replace(tensors=_MANY_TENSORS)
    more = base._replace(nbytes=2 * nbytes)
    plain = {shape: _used("plain", shape) for shape in (base, tensors, more)}
    used = {shape: _used(kind, shape) for shape in (base, pieces, tensors, more)}
    per_collective = [used[pieces][n] - used[base][n] for n in (0, 2)]
    tensor_s, byte_s = (
        used[shape][n] - used[base][n] - (plain[shape][n] - plain[base][n])
        for shape, n in ((tensors, 1), (more, 0))
    )
    return CpuCosts(
        message_s=max(0.0, per_collective[0] / per_collective[1] / (messages + MESSAGES_BY_ITSELF)),
        tensor_s=max(0.0, tensor_s / (_MANY_TENSORS - _TENSORS)),
        byte_s=max(0.0, byte_s / nbytes),
    )


def _used(kind: str, shape: _Shape) -> _Used:
    workload = emulated(_profile(shape), SEED)
    if kind == "plain":
        running = Running(workload.model, make_optimizer(workload.model.parameters()))
    else:
        piece_bytes = shape.nbytes // shape.pieces
        options = {"bucket_mb": str(piece_bytes / MIB), "bucket_view": "1"}
        if kind != "ddp":
            options = {"partition_bytes": str(piece_bytes), "credit_bytes": str(2 * piece_bytes)}
        running = set_up(kind, options, workload.model)
    found = train(workload, running, _WARMUP, _ITERATIONS, lambda step: step)
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


def _bytes_per_s(call: Callable[[], object]) -> float:
    """Of so many bytes of gradients, in a second of CPU time."""
    took_s = []
    for _ in range(_TRIES + 1):
        began_s = time.thread_time()
        call()
        took_s.append(time.thread_time() - began_s)
    return _BULK_BYTES / max(min(took_s[1:]), 1e-9)


if __name__ == "__main__":
    run_rank(Probes, _measure)
