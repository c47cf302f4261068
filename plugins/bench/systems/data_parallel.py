"""The data-parallel systems that `bytesched bench` compares, each set up on a plain model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import count, pairwise
from time import perf_counter_ns
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import bytesched
from bytesched.bench.systems import EXCHANGE_PIECES, HOROVOD_SYSTEMS, ddp_arguments
from bytesched.errors import PluginError
from bytesched.trace.timeline import Timeline

from ...exchanges.peers import peers_of
from ..workloads.emulated import EmulatedLayer
from ..workloads.experts import Exchanges, by_collectives, by_peers

MIB = 2**20
FSDP_UNITS = 12


@dataclass
class Running:
    """A system that is ready to train."""

    module: nn.Module
    #: An optimizer, or what stands for one in a training loop.
    optimizer: Any
    #: Called when the iterations are over; returns figures of the system's own, if it has any.
    close: Callable[[], dict[str, int | float | str] | None] = lambda: None
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


def set_up(kind: str, options: Mapping[str, str], model: nn.Module, device: str = "") -> Running:
    """The system `kind` around `model`; options are texts as the command line has them.

    DDP takes `bucket_mb`, `bucket_view` and `static_graph`, bytesched the fields of its
    configuration. `device` is that of ranks which share one.
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
        _shard(model, device)
        return Running(model, make_optimizer(parameters()))
    ddp: dict[str, Any] = {}
    if device:
        ddp = {"gradient_as_bucket_view": True, "device_ids": [0] if device == "cuda" else None}
    wrapped = DistributedDataParallel(model, **ddp | ddp_arguments(options))
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
        return Running(wrapped, finalizing, finalizing.update)
    # What is measured here is compared here.
    return scheduled(optimizer, wrapped, {"guard": "off", **options})


def _trace(wrapped: Any, optimizer: torch.optim.Optimizer, folder: str) -> Callable[[], None]:
    """Has plain DDP write a timeline as wrapped models do, a bucket being a chunk; ends it.

    DDP starts and awaits each all-reduce as ever; a communication hook sees it begin and end.
    """
    timeline = Timeline(folder, rank=torch.distributed.get_rank())
    steps = count(1)
    began_ns = 0

    def switch(ends: str = "") -> None:
        """What began last ends, if it has a name; from here on there is something else."""
        nonlocal began_ns
        if ends:
            timeline.on_span(ends, ends, began_ns, perf_counter_ns())
        began_ns = perf_counter_ns()

    def reduce(group: Any, bucket: Any) -> Any:
        number, sent_ns = bucket.index(), perf_counter_ns()
        if bucket.is_last():
            switch("backward")

        def arrived(future: Any) -> Any:
            at_ns, what = perf_counter_ns(), {"chunk": number}
            timeline.on_span("send", f"bucket {number}", sent_ns, at_ns, what)
            return future.value()

        return allreduce_hook(group, bucket).then(arrived)

    def stepped(*_: Any) -> None:
        switch("update")
        timeline.on_step(next(steps), perf_counter_ns())

    wrapped.register_forward_pre_hook(lambda *_: switch())
    wrapped.register_forward_hook(lambda *_: switch("forward"))
    # DDP reads the annotations of a hook, and would know none as texts.
    wrapped.register_comm_hook(None, lambda group, bucket: reduce(group, bucket))
    optimizer.register_step_pre_hook(lambda *_: switch())
    optimizer.register_step_post_hook(stepped)
    return timeline.close


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


def _shard(model: nn.Module, device: str) -> None:
    """FSDP2 in the form that sends no more than an all-reduce: gathered once per iteration.

    Units are some of equal size, or on a device each block, which fetches the next one.
    """
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError as error:
        raise PluginError("the system fsdp2 needs torch 2.6 or newer") from error
    mesh = init_device_mesh(device or "cpu", (torch.distributed.get_world_size(),))
    chain = _chain(model)
    least = 0 if device else sum(p.numel() for p in model.parameters()) / FSDP_UNITS
    units: list[list[nn.Module]] = [[]]
    for module in chain:
        if not device or list(module.children()):
            units[-1].append(module)
            if sum(p.numel() for one in units[-1] for p in one.parameters()) >= least:
                units.append([])
    for unit in units[:-1]:
        fully_shard(unit, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    for (one, *_), following in pairwise(units[:-1] if device else ()):
        one.set_modules_to_forward_prefetch(following)  # type: ignore[operator]


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
        self._ddp.register_forward_pre_hook(lambda *_: self.update())
        self._is_due = False
        self._is_finalized = False

    def zero_grad(self) -> None:
        """Nothing: the late step zeroes."""

    def step(self) -> None:
        """To be done before the next forward pass; at once, if gradients are here already."""
        self._is_due = True
        if self._is_finalized:
            self.update()

    def synchronize(self) -> None:
        """Waits for all gradients: for a script that reads them, such as one that clips."""
        self._ddp.finalize_backward()
        self._is_finalized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """As Horovod has it: inside, `step()` does not wait, because `synchronize()` did."""
        yield

    def update(self) -> None:
        """Does the step that is due, if one is."""
        if self._is_due:
            if not self._is_finalized:
                self._ddp.finalize_backward()
            self.optim.step()
            self.optim.zero_grad()
        self._is_due = self._is_finalized = False


#: a group of this process for nothing but all-to-alls
_own_group = cache(torch.distributed.new_group)
#: whether all-to-alls are in that group, whether they are urgent, and the system that carries
#: gradients, "" sending none
_WITH_EXPERTS: Final = {
    "ddp": (False, False, "ddp"),
    "ddp-own-group": (True, False, "ddp"),
    "bytesched-no-lane": (True, False, "bytesched"),
    "bytesched": (True, True, "bytesched"),
    "idle": (True, False, ""),
}


def set_up_experts(kind: str, options: Mapping[str, str], model: nn.Module) -> Running:
    """The system ``kind`` around ``model``, whose layers of experts exchange; collective."""
    pieces, carrier = 1, "bytesched"
    if kind == "bytesched-pieces":
        peers = peers_of(None)
        assert peers is not None
        start, pieces = by_peers(peers), EXCHANGE_PIECES
    else:
        has_own, is_urgent, carrier = _WITH_EXPERTS[kind]
        start = by_collectives(_own_group() if has_own else None, is_urgent=is_urgent)
    exchanges = Exchanges(start, torch.distributed.get_world_size(), pieces)
    for module in model.modules():
        if isinstance(module, EmulatedLayer):
            module.exchanges = exchanges
    if carrier:
        return replace(set_up(carrier, options, model), exchanges=exchanges)
    return Running(model, make_optimizer(model.parameters()), exchanges=exchanges)
