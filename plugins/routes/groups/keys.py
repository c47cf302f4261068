"""Waiting for keys of torch's store, whose setter or host may be gone."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import torch.distributed as dist
from torch.distributed import distributed_c10d

from bytesched.errors import TransportError

__all__ = ["await_keys"]

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
