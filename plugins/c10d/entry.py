"""Before ranks of a group do anything together: whether each of them is about to do the same.

Only the group's store is used. So a rank that cannot go on, or has other settings, is known to the
others at once, and none waits in a collective for one that never comes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from types import TracebackType
from typing import Final

import torch.distributed as dist
from torch.distributed import distributed_c10d

from bytesched.errors import MismatchError, SchedulerTimeout, in_one_line

from ..agree import disagreement
from ..routes.groups.opening import store_of

__all__ = ["Entry"]

log = logging.getLogger("bytesched")

_SHORTEST_NAP_S: Final = 1e-3
_LONGEST_NAP_S: Final = 0.05
#: of all ranks together, which one store answers
_LOOKS_PER_S: Final = 1000
#: after which it is logged, once, which ranks are waited for
_PATIENCE_S: Final = 10.0
_WRAP: Final = "bytesched.wrap"
#: holds why the ranks do not go on
_WHY: Final = "why"


class Entry:
    """One ``wrap`` that the ranks of ``base`` enter together, the n-th of each of them.

    A context: an error in it is declared to the other ranks, in place of what comes next.

    Args:
        call: what the ranks call, if it is no ``wrap``; for errors.
    """

    def __init__(self, base: dist.ProcessGroup, call: str = _WRAP) -> None:
        self._call = call
        self.base = base
        self._rank, self._size = base.rank(), base.size()
        store = store_of(base)
        # Counted in the store: the group of a later training has a new one.
        self.number: int = store.add(f"bytesched/entries/{self._rank}", 1)
        self._store = distributed_c10d.PrefixStore(f"bytesched/entry{self.number}", store)
        self._stages = 0

    def agree(self, statements: list[str], timeout_s: float) -> None:
        """Waits until all ranks have come as far, with the same ``statements``.

        Raises `MismatchError` as soon as one of them has others, or has declined, and
        `SchedulerTimeout` if one does not come.
        """
        stage, self._stages = f"stage{self._stages}", self._stages + 1
        self._compare(statements, stage)
        self._store.set(f"{stage}/{self._rank}", "")
        self._store.add(f"{stage}/count", 1)
        began_s, nap_s = time.monotonic(), _SHORTEST_NAP_S
        longest_nap_s = max(_LONGEST_NAP_S, self._size / _LOOKS_PER_S)
        patience_s = min(_PATIENCE_S, timeout_s)
        while self._store.add(f"{stage}/count", 0) < self._size:
            self._raise_if_refused()
            waited_s = time.monotonic() - began_s
            if waited_s > patience_s:
                missing = ", ".join(map(str, self._missing(stage)))
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
        self._refuse(f"rank {self._rank} {what}: {why}")

    def _compare(self, statements: list[str], stage: str) -> None:
        """With those of the rank that comes first."""
        text = json.dumps(statements)
        mine = json.dumps([self._rank, hashlib.sha256(text.encode()).hexdigest()])
        first = self._store.compare_set(f"{stage}/first", "", mine).decode()
        if first == mine:
            self._store.set(f"{stage}/text", text)
            return
        rank, digest = json.loads(first)
        if digest != json.loads(mine)[1]:
            theirs = json.loads(self._store.get(f"{stage}/text"))
            self._refuse(disagreement({rank: theirs, self._rank: statements}, self._rank))

    def _refuse(self, why: str) -> None:
        self._store.compare_set(_WHY, "", why)

    def _raise_if_refused(self) -> None:
        if self._store.check([_WHY]):
            raise MismatchError(self._store.get(_WHY).decode())

    def _missing(self, stage: str) -> list[int]:
        return [r for r in range(self._size) if not self._store.check([f"{stage}/{r}"])]

    def __enter__(self) -> Entry:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.decline(in_one_line(error))
