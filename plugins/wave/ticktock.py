"""Tick-tock: the batch of a step as waves, each of which begins when the one before turns back."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from itertools import chain
from time import perf_counter, perf_counter_ns
from typing import Any

import torch
from torch import nn

from bytesched.config import Config, warn_of_unused
from bytesched.errors import ConfigError, PluginError, SchedulerClosed
from bytesched.log import show
from bytesched.observe import Observers
from bytesched.trace.timeline import Timeline

from ..c10d.ddp import find_ddp
from ..planned.session import PlannedSession
from ..registry import session_of
from .conditions import (
    refuse_unsynchronised,
    this_rank,
    trained,
    why_accumulate,
    why_alone,
    world_size,
)
from .passes import JoinedGradients, Passes
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
        if session is None:
            # Else bytesched.wrap has set a level.
            show(config.log_level, this_rank())
        refuse_unsynchronised(
            model, optimizer, is_wrapped=session is not None, is_off=not config.enabled
        )
        if this_rank() == 0:
            # Those from elsewhere may be meant for bytesched.wrap.
            warn_of_unused(config, _USED, "TickTock", origins=["code"])
        self._model = model
        self._optimizer = optimizer
        self._loss_fn = loss_fn
        self._waves = waves
        self._ddp = find_ddp(model)
        self._update = update
        self._steps = 0
        self._closed = False
        self._all = _all_parameters(model, optimizer)
        named = _named(model, trained(self._all))
        self._trained = {id(parameter) for _, parameter in named}
        device = named[0][1].device
        self._lanes = CudaLanes(device, waves) if device.type == "cuda" else Lanes()
        self._owns_observers = not isinstance(session, PlannedSession)
        self._gradients = JoinedGradients(
            named, waves, self._lanes, rank=this_rank(), timeout_s=config.timeout_s
        )
        self._observers = (
            session.observers if isinstance(session, PlannedSession) else _own_observers(config)
        )
        self._passes = Passes(named, waves, self._gradients, self._lanes, self._observers)
        self._states = WaveStates(model, waves, world_size()) if replicas else None
        self._trial = Trial()
        why = why_accumulate(self._ddp)
        self._accumulates = bool(why)
        why = why or ("" if config.enabled else "enabled is off") or why_alone(model, device)
        if why:
            log.info("waves are off, gradients are accumulated: %s", why)
            self._trial.overlap = False
        else:
            self._trial.overlap = overlap
        if not replicas and (names := interfering(model)):
            log.info(
                "%s%s: each wave continues from the previous one, as in gradient accumulation; "
                "replicas=True gives each wave its own",
                ", ".join(names[:_NAMED]),
                ", ..." if len(names) > _NAMED else "",
            )

    def step(self, *batches: Any) -> torch.Tensor:
        """Trains on one batch, which is split, or on one for every wave; returns the mean loss.

        Gradients are set to none first and the optimizer is stepped at the end.
        """
        if self._closed:
            raise SchedulerClosed(f"rank {this_rank()}: step() of closed waves; make new ones")
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
            stack.enter_context(self._unsynchronised(wave))
            if self._states is not None:
                stack.enter_context(self._states.of(wave))
            return self._loss_fn(self._model, batch) * share

    def _unsynchronised(self, wave: int) -> AbstractContextManager[Any]:
        """Keeps DDP from sending the gradients of all waves but the last."""
        if self._ddp is None or wave == self._waves - 1:
            return nullcontext()
        return self._ddp.no_sync()

    def _accumulate(self, forwards: Sequence[Callable[[], torch.Tensor]]) -> list[torch.Tensor]:
        losses = []
        for forward in forwards:
            loss = forward()
            loss.backward()
            losses.append(loss.detach())
        return losses


def _own_observers(config: Config) -> Observers:
    """Those of waves that nothing of bytesched sends for."""
    if not config.timeline:
        return Observers()
    # Nothing of ours connects the ranks: each host's own clock has to do.
    return Observers([Timeline(config.timeline, rank=this_rank(), clock_offset_ns=0)])


def _all_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Those of the model, and what else is updated."""
    updated = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return list({id(p): p for p in chain(model.parameters(), updated)}.values())


def _named(model: nn.Module, parameters: Sequence[nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [(names.get(id(p), "a parameter of the loss"), p) for p in parameters]


#: steps of each kind before the first that counts
_WARM_UP = 2
#: steps of each kind that count
_TIMED = 5


class Trial:
    """Durations of steps in, what the next step does out. Pure.

    Both kinds take turns, so that a slow moment of the machine meets both.
    """

    def __init__(self) -> None:
        #: by whether waves overlapped
        self._durations_s: dict[bool, list[float]] = {True: [], False: []}
        #: the decision, once there is one
        self.overlap: bool | None = None

    @property
    def next_overlaps(self) -> bool:
        """Whether the waves of the next step overlap."""
        if self.overlap is not None:
            return self.overlap
        return len(self._durations_s[True]) <= len(self._durations_s[False])

    def add(self, duration_s: float) -> None:
        """The step for which ``next_overlaps`` was asked took so long."""
        self._durations_s[self.next_overlaps].append(duration_s)
        if len(self._durations_s[False]) < _WARM_UP + _TIMED:
            return
        beside_ms, after_ms = self.figures_ms()
        self.overlap = beside_ms < after_ms
        if self.overlap:
            log.info(
                "waves: a step takes %.1f ms, %.1f ms with one after another", beside_ms, after_ms
            )
        else:
            log.info(
                "waves are off, gradients are accumulated from here on: a step takes %.1f ms with "
                "waves, %.1f ms with one after another; the device is busy without them",
                beside_ms,
                after_ms,
            )

    def figures_ms(self) -> tuple[float, float]:
        """Median duration of a step, with waves that overlap and one after another; 0 if none."""
        beside, after = (
            self._durations_s[overlap][_WARM_UP:] or [0.0] for overlap in (True, False)
        )
        return 1e3 * statistics.median(beside), 1e3 * statistics.median(after)
