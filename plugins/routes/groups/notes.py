"""Why a rank stopped: a note for the others, who show it beside a broken connection."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable

from torch.distributed import distributed_c10d

__all__ = ["Notes"]

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
