"""What ranks that exchange rows have in common."""

from __future__ import annotations

import os
import signal
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from rank_worker import resolve

from bytesched.plugins.exchanges.peers import Peers


def by_all_to_all(case: tuple[str, str], *args: Any) -> Any:
    """What the case returns where no rows go by messages, as where they are on a GPU."""
    with mock.patch("bytesched.plugins.exchanges.peers.Exchanges", return_value=None):
        return resolve(case)(*args)


def dying() -> AbstractContextManager[Any]:
    """This process dies before it sends rows that it has announced."""
    return mock.patch.object(
        Peers, "start", side_effect=lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    )
