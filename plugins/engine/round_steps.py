"""Steps of a session that counts its own rounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..dependency.progress import Progress
from ..routes.handover import Handover
from ..update.deferred import Deferred
from .rounds import Rounds

__all__ = ["RoundSteps"]


class RoundSteps:
    """See `bytesched.plugins.update.stepping.Steps`."""

    def __init__(self, rounds: Rounds, handover: Handover, progress: Progress) -> None:
        self._rounds = rounds
        self._handover = handover
        self._progress = progress
        self._names = {id(slot.parameter): slot.name for slot in rounds.slots}

    @property
    def names(self) -> Mapping[int, str]:
        """The name of each parameter of the model, by its id."""
        return self._names

    @property
    def are_off(self) -> bool:
        """Whether steps are the optimizers' own at the moment."""
        return self._handover.off

    def introduce(self, deferred: Deferred) -> None:
        """``deferred`` is one of the session's optimizers from now on."""
        self._rounds.phase.introduce(deferred)

    def begin(self) -> None:
        """An update is about to begin: the round ends, at the latest."""
        self._progress.check()
        self._rounds.finish()

    def step(self, deferred: Deferred, *, whole_because: str) -> list[dict[str, Any]] | None:
        """See `Phase.step`."""
        return self._rounds.phase.step(deferred, whole_because=whole_because)

    def stepped(self) -> None:
        """``step()`` has been executed, as far as it was not deferred."""
        self._rounds.phase.stepped()

    def synchronize_all(self) -> None:
        """Applies every armed update."""
        self._rounds.phase.synchronize_all()
