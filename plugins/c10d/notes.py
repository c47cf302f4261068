"""Last words: why a rank stops, for the others to show next to their broken connection."""

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
    client has no deadline: so every question is asked on a thread of its own.
    """

    def __init__(self, store: distributed_c10d.Store, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._unanswered = False

    def leave(self, text: str) -> None:
        """Leaves ``text`` unless there is a note already."""
        note = json.dumps({"rank": self._rank, "text": text})
        self._ask(lambda: self._store.compare_set(_KEY, "", note).decode())

    def read(self) -> str:
        """What another rank said, as the end of a message; empty if there is nothing."""
        text = self._ask(
            lambda: self._store.get(_KEY).decode() if self._store.check([_KEY]) else ""
        )
        note = json.loads(text) if text else {"rank": self._rank}
        return "" if note["rank"] == self._rank else f"; rank {note['rank']} said: {note['text']}"

    def _ask(self, question: Callable[[], str]) -> str:
        """The store's answer, or nothing if it has none to give."""
        if self._unanswered:
            return ""
        answers: list[str] = []

        def ask() -> None:
            try:
                answers.append(question())
            except RuntimeError:
                log.debug("the store is gone", exc_info=True)

        thread = threading.Thread(target=ask, name="bytesched-notes", daemon=True)
        thread.start()
        thread.join(_PATIENCE_S)
        self._unanswered = thread.is_alive()
        return answers[0] if answers else ""
