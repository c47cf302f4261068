"""What ranks leave for each other in torch's store: why one stopped, and keys that are awaited."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Final

import torch.distributed as dist
from torch.distributed import distributed_c10d

from bytesched.errors import TransportError

log = logging.getLogger("bytesched")

_KEY = "note"
_PATIENCE_S = 2.0


class Notes:
    """One note of a group of ranks, in their store: the first to be left, since the rest follows.

    The store's server is often one of the ranks. If that is stopped, it never answers, and a
    client has no deadline: so every call of the store is made on a thread of its own.
    """

    def __init__(self, store: distributed_c10d.Store, rank: int) -> None:
        self._store = store
        #: what others call this rank
        self.rank = rank
        self._unanswered = False

    def leave(self, text: str) -> None:
        """Leaves ``text`` unless there is a note already."""
        note = json.dumps({"rank": self.rank, "text": text})
        self._call(lambda: self._store.compare_set(_KEY, "", note).decode())

    def read(self) -> str:
        """The note of another rank, as the end of a message; empty if there is none."""
        text = self._call(
            lambda: self._store.get(_KEY).decode() if self._store.check([_KEY]) else ""
        )
        note = json.loads(text) if text else {"rank": self.rank}
        return "" if note["rank"] == self.rank else f"; rank {note['rank']} said: {note['text']}"

    def _call(self, store_call: Callable[[], str]) -> str:
        """What the store answers in time, or nothing."""
        if self._unanswered:
            return ""
        answers: list[str] = []

        def call() -> None:
            try:
                answers.append(store_call())
            except RuntimeError:
                log.debug("the store is gone", exc_info=True)

        thread = threading.Thread(target=call, name="bytesched-notes", daemon=True)
        thread.start()
        thread.join(_PATIENCE_S)
        self._unanswered = thread.is_alive()
        return answers[0] if answers else ""


#: between two looks whether the rank that is waited for is lost
_LOOKS_EVERY_S: Final = 1.0
_SHORTEST_NAP_S: Final = 1e-3
_LONGEST_NAP_S: Final = 0.05


def await_keys(
    store: distributed_c10d.Store,
    keys: list[str],
    timeout_s: float,
    lost: Callable[[], TransportError | None],
) -> None:
    """Waits until ``store`` has ``keys``; raises the error of ``lost``, or DistStoreError.

    A store waits for a key even if the rank that was to set it is gone.
    """
    now_s = time.monotonic()
    deadline_s, look_s = now_s + timeout_s, now_s + _LOOKS_EVERY_S
    nap_s = _SHORTEST_NAP_S
    # Not store.wait in slices: c10d warns of every slice that ends.
    while not _are_set(store, keys, lost):
        now_s = time.monotonic()
        if now_s >= look_s:
            look_s = now_s + _LOOKS_EVERY_S
            error = lost()
            if error is not None:
                # It may have set them just now, and left.
                if _are_set(store, keys, lost):
                    return
                raise error
        if now_s >= deadline_s:
            raise dist.DistStoreError(f"{', '.join(keys)}: not set within {timeout_s:g} s")
        time.sleep(min(nap_s, deadline_s - now_s))
        nap_s = min(2 * nap_s, _LONGEST_NAP_S)


def _are_set(
    store: distributed_c10d.Store, keys: list[str], lost: Callable[[], TransportError | None]
) -> bool:
    try:
        return store.check(keys)
    except RuntimeError:
        # The rank that is lost may be the store's host.
        error = lost()
        if error is None:
            raise
        raise error from None
