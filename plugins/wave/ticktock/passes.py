"""The passes of one step: forward passes one after another, backward passes beside them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from time import perf_counter_ns

import torch
from torch import nn

from bytesched.errors import PluginError
from bytesched.observe import Observers

from .gradients import JoinedGradients
from .streams import Lanes


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
        """Ends the threads."""
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
