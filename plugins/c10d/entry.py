"""Before ranks of a group do anything together: whether each of them is about to do the same.

Only the group's store is used. So a rank that cannot go on, or has other settings, is known to the
others at once, and none waits in a collective for one that never comes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from typing import Any, Final

import torch.distributed as dist
from torch.distributed import distributed_c10d

from bytesched.errors import MismatchError, SchedulerTimeout, in_one_line

from ..agree import disagreement
from ..routes.opening import store_of

__all__ = ["Announcement", "Entry"]

log = logging.getLogger("bytesched")

_SHORTEST_NAP_S: Final = 1e-3
_LONGEST_NAP_S: Final = 0.05
#: of all ranks together, which one store answers
_LOOKS_PER_S: Final = 1000
#: after which it is logged, once, which ranks are waited for
_PATIENCE_S: Final = 10.0
_WRAP: Final = "bytesched.wrap"
#: holds why the ranks do not go on, or that nothing keeps them from it any more
_WHY: Final = "why"
_ALL_WRAP: Final = "wrap"


class _Meeting:
    """What the ranks of ``base`` say to each other, the n-th time that each says a thing of a kind.

    Args:
        kind: of what is said.
    """

    def __init__(self, base: dist.ProcessGroup, kind: str) -> None:
        self.base = base
        self._rank, self._size = base.rank(), base.size()
        store = store_of(base)
        # Counted in the store: the group of a later training has a new one.
        self.number: int = store.add(f"bytesched/{kind}/{self._rank}", 1)
        self._store = distributed_c10d.PrefixStore(f"bytesched/{kind}{self.number}", store)

    def _say(self, statements: list[str], stage: str) -> bool:
        """Compares them with those of the rank that says any first; whether it is this one."""
        text = json.dumps(statements)
        digest = hashlib.sha256(text.encode()).hexdigest()
        mine = json.dumps([self._rank, digest])
        first = self._store.compare_set(f"{stage}/first", "", mine).decode()
        if first == mine:
            self._store.set(f"{stage}/text", text)
        elif digest != json.loads(first)[1]:
            theirs = json.loads(self._store.get(f"{stage}/text"))
            said = {json.loads(first)[0]: theirs, self._rank: statements}
            self._decide(disagreement(said, self._rank))
        self._store.set(f"{stage}/{self._rank}", "")
        self._store.add(f"{stage}/count", 1)
        return first == mine

    def _are_missing(self, stage: str) -> bool:
        return self._store.add(f"{stage}/count", 0) < self._size

    def _missing(self, stage: str) -> str:
        """The ranks that have not said anything yet."""
        ranks = range(self._size)
        return ", ".join(str(r) for r in ranks if not self._store.check([f"{stage}/{r}"]))

    def _decide(self, why: str) -> str:
        """What is to become of it is ``why``, unless it is decided already; returns what is."""
        decided: str = self._store.compare_set(_WHY, "", why).decode()
        return decided


class Entry(_Meeting):
    """One ``wrap`` that the ranks of ``base`` enter together, the n-th of each of them.

    A context: an error in it is declared to the other ranks, in place of what comes next.

    Args:
        call: what the ranks call, if it is no ``wrap``; for errors.
    """

    def __init__(self, base: dist.ProcessGroup, call: str = _WRAP) -> None:
        super().__init__(base, "entry")
        self._call = call
        self._stages = 0

    def agree(self, statements: list[str], timeout_s: float) -> None:
        """Waits until all ranks have come as far, with the same ``statements``.

        Raises `MismatchError` as soon as one of them has others, or has declined, and
        `SchedulerTimeout` if one does not come.
        """
        stage, self._stages = f"stage{self._stages}", self._stages + 1
        self._say(statements, stage)
        began_s, nap_s = time.monotonic(), _SHORTEST_NAP_S
        longest_nap_s = max(_LONGEST_NAP_S, self._size / _LOOKS_PER_S)
        patience_s = min(_PATIENCE_S, timeout_s)
        while self._are_missing(stage):
            self._raise_if_refused()
            waited_s = time.monotonic() - began_s
            if waited_s > patience_s:
                missing = self._missing(stage)
                if waited_s > timeout_s:
                    raise SchedulerTimeout(
                        f"rank {missing} did not come to {self._call} within {timeout_s:g} s; "
                        "does every rank make the same calls of bytesched?",
                        rank=self._rank,
                    )
                patience_s = timeout_s
                log.warning("rank %d waits for rank %s: %s", self._rank, missing, self._call)
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, longest_nap_s)
        self._raise_if_refused()

    def decline(self, why: str) -> None:
        """This rank goes on alone; the others raise, with its reason ``why``."""
        what = "does not wrap" if self._call == _WRAP else f"failed in {self._call}"
        self._decide(f"rank {self._rank} {what}: {why}")

    def _raise_if_refused(self) -> None:
        if self._store.check([_WHY]):
            raise MismatchError(self._store.get(_WHY).decode())

    def __enter__(self) -> Entry:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self.decline(in_one_line(error))


class Announcement(_Meeting):
    """What a rank of ``base`` is about to do, the n-th time; made without waiting for any other.

    A reduction of all ranks has to lie between its making and `objection`: then whoever makes
    one at all has made it, however slow, and no deadline is needed to know. The rank that looks
    first decides for all.

    Args:
        statements: what has to be the same on all ranks for all to go on.
    """

    def __init__(self, base: dist.ProcessGroup, statements: list[str]) -> None:
        super().__init__(base, "announcement")
        self._came_first = self._say(statements, "intent")

    @property
    def is_first(self) -> bool:
        """True on one rank: on rank 0, if it has made one too."""
        return self._rank == 0 or (self._came_first and not self._store.check(["intent/0"]))

    def objection(self) -> str:
        """Why the ranks do not go on together, the same on all of them; empty if they do."""
        why = _ALL_WRAP
        if self._are_missing("intent"):
            why = (
                f"rank {self._missing('intent')} takes no part: it does not run under bytesched, "
                "or is not at the same place of the script"
            )
        decided = self._decide(why)
        return "" if decided == _ALL_WRAP else decided

    def withdraw(self, why: str) -> None:
        """This rank does not go on as it has announced."""
        if self._decide(f"rank {self._rank} does not go on: {why}") == _ALL_WRAP:
            # The others are about to.
            Entry(self.base).decline(why)
