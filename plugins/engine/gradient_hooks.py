"""Our hooks on the gradients of one model: put on, and taken off while nobody needs them."""

from __future__ import annotations

from collections.abc import Callable

from ..layout.slots import Slot
from .rounds import Rounds

__all__ = ["GradientHooks"]


class GradientHooks:
    """One on each parameter, or one alone that counts rounds.

    They come after those that a script has put on by then, which may change the gradient: as
    hooks of DDP do.
    """

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._handles: list[Callable[[], None]] = []
        #: rounds while only they were counted
        self.counted = 0

    def put_on(self) -> None:
        """Every gradient takes part in its round."""
        self.take_off()
        self._handles = [self._rounds.hook(slot) for slot in self._rounds.slots]

    def take_off(self) -> None:
        """No gradient does."""
        for remove in self._handles:
            remove()
        self._handles = []

    def count(self, slot: Slot) -> None:
        """No gradient does; a round is over when ``slot`` has got its own."""
        self.take_off()
        handle = slot.parameter.register_post_accumulate_grad_hook(self._count)
        self._handles = [handle.remove]

    def _count(self, _: object) -> None:
        self.counted += self._rounds.sync
