"""Links and processors as they are measured here: what messages take, and what they cost."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from bytesched.environment import RankView
from bytesched.lab.ranks import RESULT, run_ranks
from bytesched.link.fabric import ALGORITHMS, MESSAGES_BY_ITSELF, Cores
from bytesched.records import from_json
from bytesched.sim.systems import Costs, CpuCosts

_WORKER = "bytesched.plugins.bench.collectives"
_KIB = 1 << 10
#: without a launcher
_PROCESSES = 2


@dataclass(frozen=True, kw_only=True)
class Probes:
    """What every rank times."""

    sizes_bytes: tuple[int, ...] = tuple(4 * _KIB * 4**power for power in range(7))
    tries: int = 5
    #: of the models that are trained to see what they cost, and how long these may be under way
    cost_bytes: int = 8 << 20
    cost_s: float = 0.2
    #: for one collective
    timeout_s: float = 120.0


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What they found: of the slowest rank for times, means of all for costs."""

    ranks: int
    sizes_bytes: tuple[int, ...]
    #: the least time of an all-reduce of each size
    seconds: tuple[float, ...]
    cores_per_rank: float
    update_bytes_per_s: float
    copy_bytes_per_s: float
    #: of DDP, and of bytesched
    plain: CpuCosts
    scheduled: CpuCosts

    def costs(self, costs: Costs) -> Costs:
        """The same with what was measured."""
        return replace(
            costs,
            update_bytes_per_s=self.update_bytes_per_s,
            copy_bytes_per_s=self.copy_bytes_per_s,
            plain=self.plain,
            scheduled=self.scheduled,
            cores=Cores(self.cores_per_rank),
        )


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
    def of(cls, measured: Measured, origin: str) -> Links:
        """The links on which rings, which are all that Gloo has, take what was measured.

        Without what they waited for cores, which depends on how many there are.
        """
        ring = ALGORITHMS["ring"]
        messages = ring.messages(measured.ranks)
        # Small ones may be faster than the link, out of the burst that a shaped one lets through.
        (less, more), (sooner_s, later_s) = measured.sizes_bytes[-2:], measured.seconds[-2:]
        bytes_per_s = (more - less) / (later_s - sooner_s) if later_s > sooner_s else more / later_s
        # The least one is all start-up.
        start_up_s = measured.seconds[0]
        waits = 1.0 / min(1.0, measured.cores_per_rank) - 1.0
        start_up_s -= measured.plain.message_s * (messages + MESSAGES_BY_ITSELF) * waits
        return cls(
            bytes_per_s * ring.bytes_per_byte(measured.ranks),
            max(0.0, start_up_s) / messages,
            origin,
        )


def measured(view: RankView, probes: Probes = Probes()) -> tuple[Measured, str] | None:
    """What the ranks that a launcher has started find, or processes here, and where; collective.

    Rank 0 alone gets it, the others None.

    Raises `BenchError` if a rank fails.
    """
    with tempfile.TemporaryDirectory(prefix="bytesched-sim-") as folder:
        origin = run_ranks(_WORKER, probes, Path(folder), view, _PROCESSES)
        if view.rank:
            return None
        found = from_json(Measured, Path(folder, RESULT).read_text())
    return found, f"{found.ranks} ranks, {origin}"
