"""Jitter as a timeline has recorded it."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean
from typing import Final

from bytesched.trace.reading import read_traces

__all__ = ["recorded_jitter"]

#: backward passes of each rank that do not count: those of a warm-up, and what follows it
_FIRST: Final = 2
_FEWEST: Final = 8


def recorded_jitter(path: Path) -> float:
    """The jitter of a trace file, merged or not: of `weather.Climate`, the standard deviation of
    the logarithm of a rank's pace.

    The pace is that of the backward passes, in which nothing waits for the network; each rank is
    compared with itself, so that one that is always slow adds nothing.

    Raises ``OSError`` if the file cannot be read, and ``ValueError`` if it is no trace, or too
    short.
    """
    strayed = []
    ranks = read_traces(path)
    for trace in ranks:
        paces = [
            math.log(span.end_ms - span.start_ms)
            for span in trace.track("backward")[_FIRST:]
            if span.end_ms > span.start_ms
        ]
        if len(paces) < _FEWEST:
            raise ValueError(
                f"{path}: rank {trace.rank} has {len(paces)} backward passes after the first "
                f"{_FIRST}; jitter needs {_FEWEST}"
            )
        strayed += [(pace - fmean(paces)) ** 2 for pace in paces]
    return math.sqrt(sum(strayed) / (len(strayed) - len(ranks)))
