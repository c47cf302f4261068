"""What all ranks decide on together, without waiting for each other: a vote beside some rounds."""

from __future__ import annotations

from typing import Any, Final

import torch

from ..dependency.context import Context

__all__ = ["Vote"]

#: The ranks vote in rounds 1, 2, 4, 8, ..., and from here on at equal distances.
_EVERY: Final = 256


class Vote:
    """A question that every rank answers in the same rounds, and that all must answer with yes.

    Every rank casts its vote when a round begins, and learns the outcome when the next one does. So
    it is the same round for all from which on they act on it.

    Args:
        about: what it is about, for errors.
        device: of the gradients.
    """

    def __init__(self, context: Context, about: str, device: torch.device) -> None:
        self._context = context
        self._about = about
        self._device = device
        #: the sum of the votes that are under way, and the work
        self._vote: tuple[torch.Tensor, Any] | None = None

    @staticmethod
    def is_due(rounds: int) -> bool:
        """Whether there is a vote in this round, from 1 on."""
        return rounds % _EVERY == 0 or (rounds < _EVERY and rounds & (rounds - 1) == 0)

    def cast(self, *, yes: bool) -> None:
        """Votes; every rank does in the same round. The user's thread."""
        # Made there: a copy to a GPU waits for what is queued.
        votes = torch.full((1,), int(yes), device=self._device)
        try:
            self._vote = votes, self._context.backend.sum(votes, self._about)
        except BaseException as error:  # noqa: BLE001 - it is raised
            self._context.progress.raise_first(error)

    def outcome(self) -> bool | None:
        """Whether all have voted yes; None if no vote was cast since the last outcome.

        Waits for the vote, which every rank cast before it reduced the last round.
        """
        if self._vote is None:
            return None
        (votes, work), self._vote = self._vote, None
        backend = self._context.backend
        try:
            found = self._context.streams.to_host(
                votes, lambda: backend.wait(work, task=self._about)
            )
        except BaseException as error:  # noqa: BLE001 - it is raised
            # The other ranks learn of it, as they take part in it.
            self._context.progress.raise_first(error)
        return int(found) == backend.size

    def close(self) -> None:
        """Lets go of a vote that is under way, which holds the connections."""
        self._vote = None

    def __repr__(self) -> str:
        return f"<Vote {self._about!r}, {'under way' if self._vote else 'none under way'}>"
