"""Threads as the workers of one store."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

TIMEOUT_S = 100.0


def together(work: Callable[[int], Any], workers: int = 2) -> list[Any]:
    """Calls ``work(rank)`` in a thread for each worker; returns what they return."""
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(work, range(workers), timeout=TIMEOUT_S))
