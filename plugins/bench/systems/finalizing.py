"""DDP whose backward pass returns while all-reduces run: `finalize_backward`, since torch 2.15."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


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
