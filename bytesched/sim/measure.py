"""Links as they are measured here: what an all-reduce takes to start, and how fast bytes are."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from bytesched.environment import RankView
from bytesched.lab.ranks import Start, run_all, run_own
from bytesched.link.fabric import ALGORITHMS
from bytesched.records import from_json
from bytesched.tuning.fit import fit_link

__all__ = ["Links", "Measured", "Probes", "measured_links"]

_WORKER = "bytesched.plugins.bench.collectives"
_KIB = 1 << 10
#: without a launcher
_PROCESSES = 2


@dataclass(frozen=True, kw_only=True)
class Probes:
    """What every rank times."""

    sizes_bytes: tuple[int, ...] = tuple(4 * _KIB * 4**power for power in range(7))
    tries: int = 5
    #: for one collective
    timeout_s: float = 120.0


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What they found: the least time of an all-reduce of each size, of the slowest rank."""

    ranks: int
    sizes_bytes: tuple[int, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Links:
    """What a fabric is made of."""

    #: of each rank's link, in either direction
    bytes_per_s: float
    #: of each message of an all-reduce, one after another
    latency_s: float
    #: where that was measured
    origin: str

    @classmethod
    def of(cls, measured: Measured, algorithm: str, origin: str) -> Links:
        """The links on which all-reduces of this algorithm take what was measured."""
        messages, share = (of_ranks(measured.ranks) for of_ranks in ALGORITHMS[algorithm])
        line = fit_link(zip(measured.sizes_bytes, measured.seconds, strict=True))
        assert line is not None
        # The line is drawn by large ones; the least one is all start-up.
        start_up_s = max(line.overhead_s, measured.seconds[0])
        return cls(line.bytes_per_s * share, start_up_s / messages, origin)


def measured_links(view: RankView, algorithm: str) -> Links | None:
    """Those between the ranks that a launcher has started, or two processes here; collective.

    Rank 0 alone gets them, the others None.

    Raises `BenchError` if a rank fails.
    """
    with tempfile.TemporaryDirectory(prefix="bytesched-sim-") as folder:
        start = Start(_WORKER, result=str(Path(folder, "result.json")), threads=1)
        if view.launcher == "none":
            origin = run_all(Probes(), start, _PROCESSES, None, Path(folder))
        else:
            origin = run_own(Probes(), start, view)
        if view.rank:
            return None
        measured = from_json(Measured, Path(start.result).read_text())
    return Links.of(measured, algorithm, f"{measured.ranks} ranks, {origin}")
