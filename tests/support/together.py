"""Threads as the workers of one store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

TIMEOUT_S = 100.0


def together(work: Callable[[int], Any], workers: int = 2) -> list[Any]:
    """Calls ``work(rank)`` in a thread for each worker; returns what they return."""
    results: list[Any] = [None] * workers
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive(), "a worker hangs"
    if errors:
        raise errors[0]
    return results
