"""What planning costs the host of a GPU: Python calls, by their number and by what one takes here.

A host runs ahead of its device, and then they cost nothing. Of a model of many small tensors, or of
short iterations, the device waits for the host, and each call makes the iteration longer. This was
not measured on a GPU.
"""

from __future__ import annotations

from functools import lru_cache, partial
from timeit import repeat
from typing import Final

#: that bytesched makes more than plain DDP, at most: tests/procs/hazards/test_calls.py
_OF_A_TENSOR: Final = 20
_OF_A_CHUNK: Final = 60

_TIMES, _TRIES = 20_000, 5


def added_calls(tensors: int, chunks: int) -> int:
    """Python calls of an iteration that plain DDP does not make."""
    return _OF_A_TENSOR * tensors + _OF_A_CHUNK * chunks


@lru_cache(maxsize=1)
def call_s() -> float:
    """What one takes on this host that does little, as `added_calls` itself."""
    return min(repeat(partial(added_calls, 1, 1), number=_TIMES, repeat=_TRIES)) / _TIMES


def no_gain(tensors: int, chunks: int, gain_s: float) -> str:
    """Why nothing is gained on a GPU that waits for its host; empty if something may be.

    Args:
        gain_s: the most that hiding communication can gain in an iteration.
    """
    added_s = call_s() * added_calls(tensors, chunks)
    if added_s <= gain_s:
        return ""
    return (
        f"no gain here if the GPU waits for its host: for {tensors} tensors in {chunks} chunks, "
        f"bytesched's Python takes {1e3 * added_s:.3g} ms of each iteration, and at most "
        f"{1e3 * gain_s:.3g} ms can be gained"
    )
