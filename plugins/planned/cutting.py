"""Where buckets are cut into chunks."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["ends_of"]


def ends_of(numel: int, element_bytes: int, *, chunk_bytes: int) -> Sequence[int]:
    """The elements after which a chunk of a bucket ends: parts alike, of about ``chunk_bytes``.

    Args:
        chunk_bytes: 0: one chunk.
    """
    count = max(1, min(numel, round(numel * element_bytes / chunk_bytes))) if chunk_bytes else 1
    return [numel * part // count for part in range(1, count + 1)]
