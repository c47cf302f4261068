"""The passes of one step: forward passes one after another, backward passes beside them if faster.

The gradients of several waves are joined before anything is sent.
"""

from __future__ import annotations

import logging
import statistics
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from time import monotonic, perf_counter_ns

import torch
from torch import nn
from torch.autograd import Variable

from bytesched.errors import PluginError, SchedulerTimeout
from bytesched.observe import Observers

from .state import Lanes

log = logging.getLogger("bytesched")

#: a gradient, and what its reader waits for
_Given = tuple[torch.Tensor, "torch.cuda.Event | None"]


class JoinedGradients:
    """Adds up each parameter's gradients in the order of the waves, as accumulation does.

    A wave leaves its sum for the next one, which waits for it, parameter by parameter. A wave
    waits only for those before it, so one of them always goes on. In the last wave the sum takes
    the place of the gradient before it is accumulated: hooks, DDP's and bytesched's too, see one
    backward pass with the gradients of all waves.

    Waves run at the same time, each in a thread. All methods but ``begin`` and ``finish`` are
    called from any of them.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        waves: int,
        lanes: Lanes,
        *,
        rank: int,
        timeout_s: float,
    ) -> None:
        self._named = named
        self._rank = rank
        self._last = waves - 1
        self._lanes = lanes
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        #: per wave but the last: the sums that the next wave has not taken yet
        self._sums: list[dict[int, _Given | None]] = []
        #: per wave: the parameters that it is through with
        self._seen: list[set[int]] = []

    def begin(self) -> None:
        """A step begins; nothing is under way."""
        self._error = None
        self._sums = [{} for _ in range(self._last)]
        self._seen = [set() for _ in range(self._last + 1)]

    def arrived(self, wave: int, index: int, gradient: torch.Tensor) -> torch.Tensor | None:
        """``wave`` has the gradient of a parameter; returns what takes its place, if anything."""
        if wave == self._last and not self._seen[wave]:
            # Before the callbacks of what sends, which look for parameters without a gradient.
            Variable._execution_engine.queue_callback(self._add_the_rest)
        self._seen[wave].add(index)
        total = gradient
        if wave:
            earlier = self._wait(wave - 1, index)
            if earlier is not None:
                summed, given = earlier
                self._lanes.take(summed, given)
                # Not in place: what autograd hands out may belong to several parameters.
                total = summed + gradient
        if wave == self._last:
            return None if total is gradient else total
        self._leave(wave, index, (total, self._lanes.give()))
        return None

    def ended(self, wave: int) -> None:
        """The backward pass of ``wave`` is over: it has no further gradients."""
        if wave == self._last:
            self._add_the_rest()
            return
        for index in range(len(self._named)):
            if index not in self._seen[wave]:
                self._leave(wave, index, self._wait(wave - 1, index) if wave else None)

    def fail(self, error: BaseException) -> None:
        """A wave failed: waits for it raise ``error``."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def finish(self) -> None:
        """All waves are over; what they left for each other is let go."""
        self._sums = []

    def _add_the_rest(self) -> None:
        """Parameters that only earlier waves used get their gradients."""
        for index, (_, parameter) in enumerate(self._named):
            if index not in self._seen[self._last]:
                self._seen[self._last].add(index)
                earlier = self._wait(self._last - 1, index)
                if earlier is not None:
                    self._lanes.take(*earlier)
                    parameter.grad = earlier[0].clone()
                    # As autograd does when it has accumulated: these hooks send.
                    for hook in tuple((parameter._post_accumulate_grad_hooks or {}).values()):
                        hook(parameter)

    def _leave(self, wave: int, index: int, total: _Given | None) -> None:
        with self._changed:
            self._sums[wave][index] = total
            self._changed.notify_all()

    def _wait(self, wave: int, index: int) -> _Given | None:
        """The sum that ``wave`` left; None if neither it nor an earlier wave has used it."""
        sums = self._sums[wave]
        deadline = monotonic() + self._timeout_s
        with self._changed:
            while index not in sums and self._error is None and monotonic() < deadline:
                self._changed.wait(deadline - monotonic())
        if self._error is not None:
            raise self._error
        if index not in sums:
            name = self._named[index][0]
            raise SchedulerTimeout(
                f"wave {wave + 1} waited {self._timeout_s:g} s for the gradient of {name} of wave "
                f"{wave}, which is stuck in a backward pass; raise timeout_s if it was only slow",
                task=name,
                rank=self._rank,
            )
        return sums.pop(index)


class Passes:
    """Tick and tock: the forward pass of a wave begins when that of the wave before has ended.

    It then runs beside the backward pass of the wave before (Wavelet). Forward passes and
    the last backward pass run in the caller's thread, the other backward passes in threads.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        waves: int,
        gradients: JoinedGradients,
        lanes: Lanes,
        observers: Observers,
    ) -> None:
        self._named = named
        self._last = waves - 1
        self._gradients = gradients
        self._lanes = lanes
        self._observers = observers
        self._here = threading.local()
        self._pool = ThreadPoolExecutor(max(1, waves - 1), "bytesched-wave")

    def run(
        self, forwards: Sequence[Callable[[], torch.Tensor]], *, overlap: bool
    ) -> list[torch.Tensor]:
        """The loss of every wave, detached; on return the parameters have their gradients.

        Without ``overlap`` each backward pass ends before the next forward pass begins: that is
        gradient accumulation.
        """
        losses: list[torch.Tensor] = []
        beside: list[Future[None]] = []
        # First: it raises after an error, and no hook must stay then.
        self._gradients.begin()
        self._lanes.begin()
        hooks = [
            parameter.register_hook(partial(self._arrived, index))
            for index, (_, parameter) in enumerate(self._named)
        ]
        try:
            for wave, forward in enumerate(forwards):
                with self._lanes.forward(wave):
                    loss = self._forward(wave, forward)
                losses.append(loss.detach())
                if overlap and wave < self._last:
                    beside.append(self._pool.submit(self._backward, wave, loss))
                else:
                    self._backward(wave, loss)
                # The graph shall live no longer than its backward pass.
                del loss
        except BaseException as error:
            self._gradients.fail(error)
            raise
        finally:
            wait(beside)
            for hook in hooks:
                hook.remove()
            self._lanes.end()
        for ended in beside:
            ended.result()
        self._gradients.finish()
        return losses

    def close(self) -> None:
        self._pool.shutdown()

    def _forward(self, wave: int, forward: Callable[[], torch.Tensor]) -> torch.Tensor:
        began_ns = perf_counter_ns()
        loss = forward()
        if self._observers:
            name, now_ns = f"forward {wave}", perf_counter_ns()
            self._observers.on_span(f"wave {wave}", name, began_ns, now_ns)
        return loss

    def _backward(self, wave: int, loss: torch.Tensor) -> None:
        began_ns = perf_counter_ns()
        self._here.wave = wave
        try:
            # In this thread, on a GPU as well: a gradient's wave is found by it, and one that
            # waits for another wave must not hold up that wave.
            with self._lanes.backward(wave), torch.autograd.set_multithreading_enabled(False):
                if wave == self._last:
                    loss.backward()
                else:
                    # Accumulates nothing: the hooks have taken what there is.
                    parameters = [parameter for _, parameter in self._named]
                    torch.autograd.grad(loss, parameters, allow_unused=True)
                self._gradients.ended(wave)
        except BaseException as error:
            self._gradients.fail(error)
            raise
        finally:
            del self._here.wave
        if self._observers:
            name, now_ns = f"backward {wave}", perf_counter_ns()
            self._observers.on_span(f"wave {wave}", name, began_ns, now_ns)

    def _arrived(self, index: int, gradient: torch.Tensor) -> torch.Tensor | None:
        wave: int | None = getattr(self._here, "wave", None)
        if wave is None:
            raise PluginError(
                f"a backward pass other than the waves' own has a gradient of "
                f"{self._named[index][0]} during a step of the waves: the loss function may only "
                "compute the loss"
            )
        return self._gradients.arrived(wave, index, gradient)


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
