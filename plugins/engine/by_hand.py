"""Gradients that a script reduces itself, beside the session that has reduced them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

from torch import nn

from bytesched.values import size_text

from ..figures.causes import place
from ..proxies.entries import watch_reductions

__all__ = ["ByHand"]

log = logging.getLogger("bytesched")

#: steps that are looked at, and how many of them must show the same
_STEPS: Final = 3
_ENOUGH: Final = 2
#: What is reduced is all gradients if it is of their size, up to this share: a script may leave
#: some out, or pad them.
_TOLERANCE: Final = 0.1


class ByHand:
    """Watches what a script reduces between the end of backward and ``step()``, in its first steps.

    All gradients, where it has read them and then reduces as many elements over ranks which have
    the same gradients already. That is said once.

    Args:
        parameters: those of the model.
        is_read: whether the script may have a copy of the gradient of one of them.
        is_again: whether a process group has no ranks but those which have averaged gradients.
        speaks: on the rank that says so.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        is_read: Callable[[nn.Parameter], bool],
        is_again: Callable[[Any], bool],
        *,
        speaks: bool,
    ) -> None:
        self._parameters = parameters
        self._is_read = is_read
        self._is_again = is_again
        self._speaks = speaks
        #: a backward pass has ended, and no step has taken its gradients
        self._is_open = False
        self._steps = self._found = 0
        #: since then
        self._elements = 0
        self._place = ("", "")
        self.close = watch_reductions(self._reduces)

    def backward_ends(self) -> None:
        """Gradients are complete, and averaged."""
        self._is_open = True
        self._elements = 0

    def _reduces(self, group: Any, elements: int) -> None:
        if self._is_open and self._is_again(group):
            self._elements += elements
            self._place = place()

    def step_begins(self) -> bool:
        """``step()`` is called; returns whether it was the last one that is looked at."""
        if self._is_open:
            self._is_open = False
            self._steps += 1
            self._found += self._are_all()
        is_over = self._found == _ENOUGH or self._steps == _STEPS
        if is_over:
            self.close()
            if self._found == _ENOUGH and self._speaks:
                self._warn()
        return is_over

    def _are_all(self) -> bool:
        if not self._elements:
            return False
        given = [parameter for parameter in self._parameters if parameter.grad is not None]
        least = (1 - _TOLERANCE) * sum(parameter.numel() for parameter in given)
        # Some write zeros for what got no gradient.
        most = (1 + _TOLERANCE) * sum(parameter.numel() for parameter in self._parameters)
        read = sum(parameter.numel() for parameter in given if self._is_read(parameter))
        return least <= min(self._elements, read) and self._elements <= most

    def _warn(self) -> None:
        function, line = self._place
        nbytes = sum(parameter.nbytes for parameter in self._parameters)
        log.warning(
            "the script reduces all gradients itself between backward() and step() (%s, %s), but "
            "bytesched.wrap has already averaged them over all ranks: in every iteration %s are "
            "sent twice, and waited for. Remove the script's own reduction and its division by "
            "the number of ranks; or remove bytesched.wrap",
            function or "a process group",
            line,
            size_text(nbytes),
        )
