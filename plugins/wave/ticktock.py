"""Tick-tock: the batch of a step as waves, each of which begins when the one before turns back."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from time import perf_counter, perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bytesched.config import Config, warn_of_unused
from bytesched.errors import ConfigError, PluginError, SchedulerClosed
from bytesched.log import show
from bytesched.observe import Observers
from bytesched.trace.timeline import Timeline

from ..c10d.ddp import find_ddp
from ..planned.session import PlannedSession
from ..registry import session_of
from .passes import JoinedGradients, Passes, Trial
from .state import CudaLanes, Lanes, WaveStates, interfering, of_waves

log = logging.getLogger("bytesched")

_NAMED = 5
_USED = frozenset({"enabled", "timeout_s", "timeline", "log_level"})


class TickTock:
    """Trains a model in waves: the next forward pass runs beside the last backward pass.

    ``step`` is gradient accumulation over the batches of the waves, and has its results (Wavelet,
    Wang et al., MLSys 2021: data-parallel tick-tock). One copy of the weights serves all waves.
    Their gradients are added up, then sent as those of one backward pass, by DDP or bytesched.

    Args:
        model: a module, or a DistributedDataParallel.
        optimizer: of its parameters; also one that ``bytesched.wrap`` was called on.
        loss_fn: ``loss_fn(model, batch)`` runs forward and returns the mean loss of the batch.
        waves: how many; 2 are tick and tock.
        replicas: each wave has BatchNorm statistics and random numbers of its own.
        overlap: whether waves run beside each other, or one after another, which is gradient
            accumulation. None: the first steps find out what is faster.
        update: called in place of ``optimizer.step()``, when the gradients of all waves and ranks
            are there: the place to clip them, or for a ``GradScaler``.
        fields: settings, as for ``bytesched.wrap``.

    Raises PluginError where gradients would not be synchronised, or ConfigError.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[[nn.Module, Any], torch.Tensor],
        *,
        waves: int = 2,
        replicas: bool = False,
        overlap: bool | None = None,
        update: Callable[[], object] | None = None,
        **fields: Any,
    ) -> None:
        if waves < 2:
            raise ConfigError(f"waves = {waves}: there are at least 2")
        config = Config.load(**fields)
        session = session_of(optimizer)
        ranks, self._rank = 1, 0
        if dist.is_available() and dist.is_initialized():
            ranks, self._rank = dist.get_world_size(), dist.get_rank()
        if session is None:
            # Else bytesched.wrap has set a level.
            show(config.log_level, self._rank)
        self._ddp = find_ddp(model)
        sends = session or self._ddp or hasattr(optimizer, "_allreduce_grad_async")
        if ranks > 1 and not sends:
            why = "" if config.enabled else ", and enabled is off"
            raise PluginError(
                f"nothing synchronises the gradients of the {ranks} ranks{why}: put the model "
                "into DistributedDataParallel, or call bytesched.wrap(optimizer, model) first"
            )
        if self._rank == 0:
            # Those from elsewhere may be meant for bytesched.wrap.
            warn_of_unused(config, _USED, "TickTock", origins=["code"])
        self._model = model
        self._optimizer = optimizer
        self._loss_fn = loss_fn
        self._waves = waves
        self._update = update
        self._steps = 0
        self._closed = False
        # Those of the model, and what else is updated.
        updated = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        self._all = list({id(p): p for p in chain(model.parameters(), updated)}.values())
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        named = [(names.get(id(p), "a parameter of the loss"), p) for p in _trained(self._all)]
        self._trained = {id(parameter) for _, parameter in named}
        device = named[0][1].device
        self._lanes = CudaLanes(device, waves) if device.type == "cuda" else Lanes()
        self._gradients = JoinedGradients(
            named, waves, self._lanes, rank=self._rank, timeout_s=config.timeout_s
        )
        self._owns_observers = not isinstance(session, PlannedSession)
        self._observers = session.observers if isinstance(session, PlannedSession) else Observers()
        if self._owns_observers and config.timeline:
            # Nothing of ours connects the ranks: each host's own clock has to do.
            self._observers.add(Timeline(config.timeline, rank=self._rank, clock_offset_ns=0))
        self._passes = Passes(named, waves, self._gradients, self._lanes, self._observers)
        self._states = WaveStates(model, waves, ranks) if replicas else None
        self._trial = Trial()
        why = _why_accumulate(self._ddp)
        self._accumulates = bool(why)
        why = why or ("" if config.enabled else "enabled is off") or _why_alone(model, device)
        if why:
            log.info("waves are off, gradients are accumulated: %s", why)
            self._trial.overlap = False
        else:
            self._trial.overlap = overlap
        if not replicas and (found := interfering(model)):
            log.info(
                "%s%s: each wave continues from the previous one, as in gradient accumulation; "
                "replicas=True gives each wave its own",
                ", ".join(found[:_NAMED]),
                ", ..." if len(found) > _NAMED else "",
            )

    def step(self, *batches: Any) -> torch.Tensor:
        """Trains on one batch, which is split, or on one for every wave; returns the mean loss.

        Gradients are set to none first and the optimizer is stepped at the end.
        """
        if self._closed:
            raise SchedulerClosed(f"rank {self._rank}: step() of closed waves; make new ones")
        parts, shares = of_waves(batches, self._waves)
        forwards = [
            partial(self._forward, wave, part, share)
            for wave, (part, share) in enumerate(zip(parts, shares, strict=True))
        ]
        if {id(parameter) for parameter in self._all if parameter.requires_grad} != self._trained:
            raise PluginError(
                "other parameters require a gradient than when the waves were made: close them "
                "and make new ones after freezing or unfreezing"
            )
        undecided = self._trial.overlap is None
        if undecided:
            self._lanes.synchronize()
        began_s = perf_counter()
        self._optimizer.zero_grad()
        if self._accumulates:
            losses = self._accumulate(forwards)
        else:
            losses = self._passes.run(forwards, overlap=self._trial.next_overlaps)
        if self._update is None:
            self._optimizer.step()
        else:
            self._update()
        if undecided:
            self._lanes.synchronize()
            self._trial.add(perf_counter() - began_s)
        self._steps += 1
        if self._observers and self._owns_observers:
            self._observers.on_step(self._steps, perf_counter_ns())
        return torch.stack(losses).sum()

    @property
    def overlaps(self) -> bool:
        """Whether the waves of the next step run beside each other."""
        return self._trial.next_overlaps

    def stats(self) -> dict[str, int | float | str]:
        """Figures of the steps so far; medians of the trial in ms, 0 if there was none."""
        waves_ms, accumulation_ms = self._trial.figures_ms()
        return {
            "steps": self._steps,
            "waves": self._waves,
            "mode": "waves" if self.overlaps else "accumulation",
            "trial_waves_ms": waves_ms,
            "trial_accumulation_ms": accumulation_ms,
        }

    def close(self) -> None:
        """Ends threads of its own. Idempotent."""
        self._closed = True
        self._passes.close()
        self._gradients.finish()
        if self._owns_observers:
            self._observers.close()

    def _forward(self, wave: int, batch: Any, share: float) -> torch.Tensor:
        with ExitStack() as stack:
            if self._ddp is not None and wave < self._waves - 1:
                # DDP sends gradients with those of the last wave.
                stack.enter_context(self._ddp.no_sync())
            if self._states is not None:
                stack.enter_context(self._states.of(wave))
            return self._loss_fn(self._model, batch) * share

    def _accumulate(self, forwards: Sequence[Callable[[], torch.Tensor]]) -> list[torch.Tensor]:
        losses = []
        for forward in forwards:
            loss = forward()
            loss.backward()
            losses.append(loss.detach())
        return losses


def _trained(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Those that may get a gradient. Raises PluginError for none, or if they are scattered."""
    found = [parameter for parameter in parameters if parameter.requires_grad]
    if not found:
        raise PluginError("the model has no parameter that requires a gradient")
    if len({parameter.device for parameter in found}) > 1:
        raise PluginError("the parameters are on several devices: waves need them on one")
    return found


def _why_accumulate(ddp: nn.parallel.DistributedDataParallel | None) -> str:
    """Why every wave needs an ordinary backward pass of its own; empty if it does not."""
    if ddp is not None and ddp.static_graph:
        return "DDP with static_graph counts the backward passes of all waves"
    if ddp is not None and ddp.find_unused_parameters:
        return "DDP with find_unused_parameters looks only at what the last wave uses"
    return ""


def _why_alone(model: nn.Module, device: torch.device) -> str:
    """Why waves cannot run beside each other, or cannot gain by it; empty if they can."""
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        return "SyncBatchNorm communicates in forward and backward, in an order of its own"
    # macOS cannot bind a process to cores.
    bound = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if bound else os.cpu_count()
    return "this process has one core" if device.type == "cpu" and cores == 1 else ""
