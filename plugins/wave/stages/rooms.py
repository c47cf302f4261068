"""Which stages visit this rank, and how many bytes of weights and gradients it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from .routes import WEIGHTS, Cargo, Route
from .stage import Stage

#: stages on a visit: one that is computed with, and the next
ROOMS: Final = 2
#: gradients that may wait: of this rank, for the sum of those before it, and sums, to be sent
WAITING: Final = 2


class Rooms:
    """Room for visitors, and a count of bytes. Callers hold one lock.

    Args:
        stages: all of the model, by index.
    """

    def __init__(self, stages: Sequence[Stage], rank: int) -> None:
        self._stages = stages
        self._home = stages[rank]
        self._free = ROOMS
        #: visits of this step that this rank has computed with
        self._used: set[tuple[Cargo, int]] = set()
        self._live_bytes = 0
        #: the most bytes of weights and gradients that were here, the stage at home included
        self.peak_bytes = 0
        self.count(self._home.nbytes)

    @property
    def bound_bytes(self) -> int:
        """What ``peak_bytes`` cannot exceed, however fast or slow the other ranks are."""
        largest_bytes = max(stage.nbytes for stage in self._stages)
        # At home weights and gradients; else visitors, gradients that wait, and one that arrives.
        return 2 * self._home.nbytes + (ROOMS + 2 * WAITING + 1) * largest_bytes

    def begin(self, *, train: bool) -> None:
        """A step begins; if it trains, with memory for the sum of all ranks' gradients."""
        self._used.clear()
        if train:
            self.count(self._home.nbytes)

    def end(self) -> None:
        """The step has ended: only the stage at home is left."""
        self.count(self._home.nbytes - self._live_bytes)

    def has_room(self, stage: Stage) -> bool:
        """Whether ``stage`` may come; false while it is still here from the forward pass."""
        return self._free > 0 and not stage.present

    def come(self, stage: Stage) -> None:
        """Takes a room for ``stage``."""
        self._free -= 1
        self.count(stage.nbytes)
        stage.come()

    def used(self, cargo: Cargo, index: int, left: Mapping[Route, int]) -> None:
        """This rank has computed with the weights of a stage; see `release` for ``left``."""
        self._used.add((cargo, index))
        self.release(cargo, index, left)

    def release(self, cargo: Cargo, index: int, left: Mapping[Route, int]) -> None:
        """A visitor leaves when it was used here and has been passed on.

        Args:
            left: how many chunks of this step are still to be sent, by route.
        """
        stage = self._stages[index]
        cargoes = {cargo}
        if stage is self._stages[-1] and any(route.cargo is Cargo.GRADIENT for route in left):
            # It stays from forward to backward.
            cargo, cargoes = Cargo.BACKWARD, set(WEIGHTS)
        if stage.is_home or (cargo, index) not in self._used:
            return
        if any(n and route.stage == index and route.cargo in cargoes for route, n in left.items()):
            return
        stage.leave()
        self._free += 1
        self.count(-stage.nbytes)

    def count(self, nbytes: int) -> None:
        """So many bytes more are held, or fewer if negative."""
        self._live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)
