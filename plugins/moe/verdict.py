"""Whether all ranks' experts have computed what they had to, which every rank learns."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bytesched.errors import MismatchError

from .peers import Peers

__all__ = ["Failure", "Verdict"]


@dataclass(frozen=True)
class Failure:
    """Why a rank's experts did not compute: what one of them raised, or was found to have made."""

    error: Exception


class Verdict:
    """A word from every rank to each, which travels behind the results; collective.

    Without it a rank whose expert fails would raise alone, and the others wait for its results.

    Args:
        failure: of this rank.
    """

    def __init__(
        self, peers: Peers, failure: Failure | None, device: torch.device, *, is_urgent: bool
    ) -> None:
        self._failure = failure
        word = torch.full((peers.size, 1), int(failure is not None), device=device)
        once = [1] * peers.size
        self._words = peers.start(word, once, once, "moe verdict", is_urgent=is_urgent)

    def check(self) -> None:
        """Raises on every rank if experts of one have failed: this rank's own error, if it has."""
        words = self._words.wait().flatten().tolist()
        if self._failure is not None:
            raise self._failure.error
        if any(words):
            rank = words.index(1)
            raise MismatchError(
                f"experts of rank {rank} of the group did not compute: see the error that this "
                "rank raises; no results of the layer are used"
            )
