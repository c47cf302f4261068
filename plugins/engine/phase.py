"""What a session does in its two lives: while the first round is learned from, and afterwards."""

from __future__ import annotations

from typing import Any, Protocol

from ..layout.plan import Plan
from ..layout.slots import Slot
from ..routes.carrier import Traffic
from ..update.deferred import Deferred

__all__ = ["Life", "Phase"]


class Life(Protocol):
    """What every hooked model is at a time."""

    @property
    def plan(self) -> Plan | None:
        """What is sent; None while it is not known."""

    @property
    def traffic(self) -> Traffic:
        """What has been carried so far."""

    @property
    def order(self) -> str:
        """How the ranks come to one order, for ``stats()``."""

    def synchronize_all(self) -> None:
        """Applies every armed update."""

    def state(self) -> str:
        """In a few words, for ``repr()``."""

    def disown(self) -> None:
        """In a forked child: what is outstanding will not come, and the rest is ordinary."""

    def close(self, *, release_parameters: bool) -> None:
        """Stops what carries the plan; what it has made of parameters and gradients is undone."""


class Phase(Life, Protocol):
    """A life of a session whose updates are made here: warming up, or running."""

    @property
    def find_unused(self) -> bool:
        """Whether parameters may get no gradient in a round."""

    def before_forward(self, steps: int) -> None:
        """The model is called, after so many calls of ``step()``."""

    def forward_begins(self) -> None:
        """Its forward pass begins; gradients of the last round may be on the wire."""

    def forward_ends(self) -> None:
        """Its forward pass is over."""

    def begin_round(self, *, forward_seen: bool) -> None:
        """The first gradient comes, after a forward pass or after another backward pass."""

    def gradient(self, slot: Slot) -> None:
        """``slot`` has its gradient."""

    def end_round(self) -> Phase:
        """No gradient comes any more; returns the phase of the next round."""

    def wait_reduced(self) -> None:
        """Returns when nothing is on the wire."""

    def introduce(self, deferred: Deferred) -> None:
        """``deferred`` is one of the session's optimizers from now on."""

    def step(self, deferred: Deferred, *, whole_because: str) -> list[dict[str, Any]] | None:
        """``step()`` updates now: the groups of what cannot wait, or None if that is everything.

        Args:
            whole_because: why nothing of it can wait; empty if some can.
        """

    def stepped(self) -> None:
        """``step()`` has been executed, as far as it was not deferred."""
