"""The data-parallel systems that `bytesched bench` compares, each set up on a plain model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from time import perf_counter_ns
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import bytesched
from bytesched.bench.systems import (
    DDP_WITH_OPTIONS,
    EXCHANGE_PIECES,
    HOROVOD_SYSTEMS,
    ddp_arguments,
)
from bytesched.errors import PluginError
from bytesched.trace.timeline import Timeline

from ...exchanges.peers import peers_of
from ..workloads.experts import EmulatedExperts, Exchanges, InPieces

MIB = 2**20
FSDP_UNITS = 12


@dataclass
class Running:
    """A system that is ready to train."""

    module: nn.Module
    #: An optimizer, or what stands for one in a training loop.
    optimizer: Any
    #: Called when the iterations are over; returns figures of the system's own.
    close: Callable[[], dict[str, int | float | str]] = field(default=dict)
    #: what carries all-to-alls, if there are any
    exchanges: Exchanges | None = None


_ADAMW: dict[str, Any] = {"lr": 1e-3, "fused": True}


def make_optimizer(
    parameters: Iterable[torch.Tensor], *, fused: bool = True
) -> torch.optim.Optimizer:
    """That of all systems: AdamW, in torch's fused form unless they send through a store.

    A fused step rounds the last elements of a tensor in their own way, and a store that updates has
    other tensors than the workers.
    """
    return torch.optim.AdamW(parameters, **_ADAMW | {"fused": fused})


def set_up(kind: str, options: Mapping[str, str], model: nn.Module, **ddp: Any) -> Running:
    """The system `kind` around `model`; options are texts as the command line has them.

    DDP takes `bucket_mb`, `bucket_view` and `static_graph`, bytesched the fields of its
    configuration. `ddp` has further arguments of DDP.
    """
    parameters = model.parameters
    if kind in HOROVOD_SYSTEMS:
        import horovod.torch as hvd

        inner = make_optimizer(parameters())
        averaging = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
        if kind == "horovod":
            return Running(model, averaging)
        return scheduled(averaging, model, options)
    if kind == "fsdp2":
        _shard(model)
        return Running(model, make_optimizer(parameters()))
    own = ddp_arguments(options) if kind in DDP_WITH_OPTIONS else {}
    wrapped = DistributedDataParallel(model, **ddp | own)
    if kind == "zero1":
        # It compiles optimizers of TorchScript when it is imported, which warns.
        from torch.distributed.optim import ZeroRedundancyOptimizer

        sharded = ZeroRedundancyOptimizer(parameters(), optimizer_class=torch.optim.AdamW, **_ADAMW)
        return Running(wrapped, sharded)
    optimizer = make_optimizer(parameters())
    if kind == "ddp":
        if folder := options.get("timeline"):
            return Running(wrapped, optimizer, _trace(wrapped, optimizer, folder))
        return Running(wrapped, optimizer)
    if kind == "ddp-finalize":
        finalizing = Finalizing(optimizer, wrapped)
        return Running(wrapped, finalizing, finalizing.close)
    # What is measured here is compared here.
    return scheduled(optimizer, wrapped, {"guard": "off", **options})


def _trace(wrapped: Any, optimizer: torch.optim.Optimizer, folder: str) -> Callable[[], Any]:
    """Has plain DDP write a timeline as wrapped models do, a bucket being a chunk; ends it.

    DDP starts and awaits each all-reduce as ever; a communication hook sees it begin and end.
    """
    timeline = Timeline(folder, rank=torch.distributed.get_rank())
    began_ns = {"forward": 0, "backward": 0, "update": 0}
    steps = count(1)

    def begin(track: str) -> None:
        began_ns[track] = perf_counter_ns()

    def end(track: str) -> None:
        timeline.on_span(track, track, began_ns[track], perf_counter_ns())

    def computed(*_: Any) -> None:
        end("forward")
        begin("backward")

    def reduce(group: Any, bucket: Any) -> Any:
        number, sent_ns = bucket.index(), perf_counter_ns()
        if bucket.is_last():
            end("backward")

        def arrived(future: Any) -> Any:
            at_ns, what = perf_counter_ns(), {"chunk": number}
            timeline.on_span("send", f"bucket {number}", sent_ns, at_ns, what)
            return future.value()

        return allreduce_hook(group, bucket).then(arrived)

    def stepped(*_: Any) -> None:
        end("update")
        timeline.on_step(next(steps), perf_counter_ns())

    wrapped.register_forward_pre_hook(lambda *_: begin("forward"))
    wrapped.register_forward_hook(computed)
    # DDP reads the annotations of a hook, and would know none as texts.
    wrapped.register_comm_hook(None, lambda group, bucket: reduce(group, bucket))
    optimizer.register_step_pre_hook(lambda *_: begin("update"))
    optimizer.register_step_post_hook(stepped)

    def close() -> dict[str, int | float | str]:
        timeline.close()
        return {}

    return close


def scheduled(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    options: Mapping[str, str],
    kvstore: Any = None,
) -> Running:
    """``bytesched.wrap`` with these options."""
    bytesched.wrap(optimizer, model, kvstore=kvstore, **options)  # type: ignore[call-overload]

    def close() -> dict[str, int | float | str]:
        bytesched.flush(optimizer)
        figures = bytesched.stats(optimizer)
        bytesched.unwrap(optimizer)
        return figures

    return Running(model, optimizer, close)


def _shard(model: nn.Module) -> None:
    """FSDP2 in the form that sends no more than an all-reduce: gathered once per iteration."""
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError as error:
        raise PluginError("the system fsdp2 needs torch 2.6 or newer") from error
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    total = sum(p.numel() for p in model.parameters())
    unit: list[nn.Module] = []
    size = 0
    for module in _chain(model):
        unit.append(module)
        size += sum(p.numel() for p in module.parameters())
        if size * FSDP_UNITS >= total:
            fully_shard(unit, mesh=mesh, reshard_after_forward=False)
            unit, size = [], 0
    fully_shard(model, mesh=mesh, reshard_after_forward=False)


def _chain(model: nn.Module) -> list[nn.Module]:
    """The longest list of modules in the model that run one after another."""
    chains = [list(m) for m in model.modules() if isinstance(m, nn.Sequential)]
    return max(chains, key=len, default=[])


class Finalizing:
    """What stands for an optimizer in a training loop: its steps are late, and its numbers are not.

    `step()` returns at once. When the next forward pass begins, it waits for all gradients, then
    updates and zeroes: until then all-reduces run beside whatever the script does.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, ddp: Any) -> None:
        #: with the state
        self.optim = optimizer
        self._ddp = ddp
        self._ddp.require_manual_backward_finalization = True
        self._ddp.register_forward_pre_hook(lambda *_: self._update())
        self._is_due = False
        self._is_finalized = False

    def zero_grad(self) -> None:
        """Nothing: the late step zeroes."""

    def step(self) -> None:
        """To be done before the next forward pass; at once, if gradients are here already."""
        self._is_due = True
        if self._is_finalized:
            self._update()

    def synchronize(self) -> None:
        """Waits for all gradients: for a script that reads them, such as one that clips."""
        self._ddp.finalize_backward()
        self._is_finalized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """As Horovod has it: inside, `step()` does not wait, because `synchronize()` did."""
        yield

    def close(self) -> dict[str, int | float | str]:
        """Does the step that is due; there are no figures."""
        self._update()
        return {}

    def _update(self) -> None:
        if self._is_due:
            if not self._is_finalized:
                self._ddp.finalize_backward()
            self.optim.step()
            self.optim.zero_grad()
        self._is_due = self._is_finalized = False


def _in_pieces() -> Exchanges:
    peers = peers_of(None)
    assert peers is not None
    return InPieces(peers, count=EXCHANGE_PIECES)


def _own_group(*, is_urgent: bool = False) -> Exchanges:
    return Exchanges(torch.distributed.new_group(), is_urgent=is_urgent)


#: what carries all-to-alls, and the system that carries gradients; "" sends none
_WITH_EXPERTS: dict[str, tuple[Callable[[], Exchanges], str]] = {
    "ddp": (lambda: Exchanges(None, is_urgent=False), "ddp"),
    "ddp-own-group": (_own_group, "ddp"),
    "bytesched-no-lane": (_own_group, "bytesched"),
    "bytesched": (lambda: _own_group(is_urgent=True), "bytesched"),
    "bytesched-pieces": (_in_pieces, "bytesched"),
    "idle": (_own_group, ""),
}


def set_up_experts(kind: str, options: Mapping[str, str], model: nn.Module) -> Running:
    """The system ``kind`` around ``model``, whose layers of experts exchange; collective."""
    make, carrier = _WITH_EXPERTS[kind]
    exchanges = make()
    for module in model.modules():
        if isinstance(module, EmulatedExperts):
            module.exchanges = exchanges
    if carrier:
        running = set_up(carrier, options, model)
    else:
        running = Running(model, make_optimizer(model.parameters()))

    def close() -> dict[str, int | float | str]:
        figures = running.close()
        exchanges.close()
        return figures

    return replace(running, close=close, exchanges=exchanges)
