"""What a rank is about to do, left in the store of a group for the others to read."""

from __future__ import annotations

import hashlib
import json
from typing import Final

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..agree import disagreement
from ..routes.groups.opening import store_of
from .entry import Entry

__all__ = ["Announcement"]

_VERDICT: Final = "verdict"
_ALL_WRAP: Final = "wrap"


class Announcement:
    """The n-th of each rank of ``base``; made without waiting for any other.

    A reduction of all ranks has to lie between its making and `objection`: then whoever makes
    one at all has made it, however slow, and no deadline is needed to know.

    Args:
        statements: what has to be the same on all ranks for all to go on.
    """

    def __init__(self, base: dist.ProcessGroup, statements: list[str]) -> None:
        self._base = base
        self._rank, self._size = base.rank(), base.size()
        store = store_of(base)
        number = store.add(f"bytesched/announcements/{self._rank}", 1)
        self._store = distributed_c10d.PrefixStore(f"bytesched/announcement{number}", store)
        text = json.dumps(statements)
        self._store.set(str(self._rank), text)
        #: counts the ranks that have announced the same
        self._same = f"same {hashlib.sha256(text.encode()).hexdigest()}"
        self._store.add(self._same, 1)
        self._came_first = self._store.add("made", 1) == 1

    @property
    def is_first(self) -> bool:
        """True on one rank: on rank 0, if it has made one too."""
        return self._rank == 0 or (self._came_first and not self._store.check(["0"]))

    def objection(self) -> str:
        """Why the ranks do not go on together, the same on all of them; empty if they do."""
        return self._decided(self._why() or _ALL_WRAP)

    def withdraw(self, why: str) -> None:
        """This rank does not go on as it has announced."""
        if not self._decided(f"rank {self._rank} does not go on: {why}"):
            # The others are about to.
            Entry(self._base).decline(why)

    def _decided(self, verdict: str) -> str:
        """What the rank that came here first has decided, which is ``verdict`` if it is this."""
        held = self._store.compare_set(_VERDICT, "", verdict).decode()
        return "" if held == _ALL_WRAP else held

    def _why(self) -> str:
        if self._store.add(self._same, 0) == self._size:
            return ""
        ranks = [str(rank) for rank in range(self._size)]
        if not self._store.check(ranks):
            missing = [rank for rank in ranks if not self._store.check([rank])]
            return (
                f"rank {', '.join(missing)} takes no part: it does not run under bytesched, or is "
                "not at the same place of the script"
            )
        texts = self._store.multi_get(ranks)
        return disagreement({r: json.loads(text) for r, text in enumerate(texts)}, self._rank)
