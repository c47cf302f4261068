"""Horovod in `bytesched bench`: its blocks, and the sweep of its settings.

Horovod reads fusion threshold and cycle time when it starts, and a process cannot
start it again with other ones: what was set once stays set, and setting both crashes. So every
block has processes of its own. The ranks that start them wait meanwhile and use no core.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch.distributed as dist
from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

from bytesched.bench.specification import Specification
from bytesched.bench.systems import System
from bytesched.lab.ranks import Place

from .data_parallel import MIB
from .processes import OwnProcesses

RANK = "bytesched.plugins.bench.systems.rank"
SWEPT_FUSION_MB = (1, 2, 4, 8, 16, 128)
#: the first is Horovod's own
SWEPT_CYCLES_MS = (1, 0.5, 5)
#: Settings of the user's that a block does not inherit.
NOT_INHERITED = (
    "HOROVOD_FUSION_THRESHOLD",
    "HOROVOD_CYCLE_TIME",
    "HOROVOD_CACHE_CAPACITY",
    "HOROVOD_AUTOTUNE",
    "HOROVOD_AUTOTUNE_LOG",
    "HOROVOD_TIMELINE",
)


@dataclass(frozen=True)
class Settings:
    """What Horovod is started with; None is Horovod's default."""

    fusion_mb: float | None = None
    cycle_ms: float | None = None
    cache: bool = True

    def __str__(self) -> str:
        return f"{self.fusion_mb:g} MB, {self.cycle_ms:g} ms{'' if self.cache else ', no cache'}"

    def options(self) -> dict[str, str]:
        """The same as options of a system."""
        return {"fusion_mb": str(self.fusion_mb), "cycle_ms": str(self.cycle_ms)} | (
            {} if self.cache else {"cache": "0"}
        )

    def environment(self) -> dict[str, str]:
        """The variables that Horovod reads."""
        found = {}
        if self.fusion_mb is not None:
            found["HOROVOD_FUSION_THRESHOLD"] = str(round(self.fusion_mb * MIB))
        if self.cycle_ms is not None:
            found["HOROVOD_CYCLE_TIME"] = str(self.cycle_ms)
        if not self.cache:
            found["HOROVOD_CACHE_CAPACITY"] = "0"
        return found


def split_options(options: Mapping[str, str]) -> tuple[Settings, dict[str, str]]:
    """The settings of Horovod among the options of a system, and what is left."""
    left = dict(options)
    fusion_mb, cycle_ms = left.pop("fusion_mb", None), left.pop("cycle_ms", None)
    settings = Settings(
        None if fusion_mb is None else float(fusion_mb),
        None if cycle_ms is None else float(cycle_ms),
        left.pop("cache", "1") != "0",
    )
    return settings, left


class HorovodBlocks:
    """Runs blocks of Horovod; every rank of the bench makes the same calls.

    Args:
        place: where this rank of the bench runs.
        content: the model, as `build` wants it.
    """

    def __init__(self, spec: Specification, place: Place, content: object) -> None:
        self._place = place
        by_mpi = spec.controller == "mpi"
        self._processes = OwnProcesses(
            RANK, spec, place, content, by_mpi=by_mpi, unset=NOT_INHERITED
        )
        self._server: RendezvousHTTPServer | None = None
        self._network = {"HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi"}
        if not by_mpi:
            self._network = self._gloo_network()

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def block(self, system: System, warmup: int, iterations: int) -> dict[str, Any]:
        """What `train` found on this rank."""
        settings, options = split_options(system.options)
        if self._server is not None:
            self._server.init([])
        return self._processes.block(
            replace(system, options=options),
            warmup,
            iterations,
            self._network | settings.environment(),
        )

    def _gloo_network(self) -> dict[str, str]:
        """What Horovod's own launcher would set for this rank; rank 0 begins to listen for all."""
        port = [0]
        address = self._place.address
        if self._processes.rank == 0:
            self._server = RendezvousHTTPServer((address, 0), RendezvousHandler, 0)
            threading.Thread(target=self._server.serve_forever, daemon=True).start()
            port = [self._server.server_address[1]]
        dist.broadcast_object_list(port)
        nodes: list[str] = [""] * self._processes.world_size
        dist.all_gather_object(nodes, self._place.node)
        hosts = [HostInfo(node, len(list(ranks))) for node, ranks in groupby(nodes)]
        slot = get_host_assignments(hosts, self._processes.world_size)[self._processes.rank]
        found = create_slot_env_vars(slot)
        found |= create_run_env_vars(address, [self._place.interface], port[0])
        return {name: str(value) for name, value in found.items() if value != ""}


def sweep(
    measure: Callable[[Settings], float], given: Settings = Settings()
) -> dict[Settings, float]:
    """Milliseconds of plain Horovod for the settings tried; `measure` returns them for one.

    First the fusion threshold with the default cycle time, then other cycle times with the best
    threshold; what is `given` is not varied. What seems to be the fastest is measured again, so
    that luck does not choose.
    """
    thresholds_mb = SWEPT_FUSION_MB if given.fusion_mb is None else (given.fusion_mb,)
    first_ms, *others_ms = SWEPT_CYCLES_MS if given.cycle_ms is None else (given.cycle_ms,)
    samples: dict[Settings, list[float]] = {}

    def ms(settings: Settings) -> float:
        return statistics.fmean(samples[settings])

    def fastest_of(tried: Iterable[Settings]) -> Settings:
        for settings in tried:
            samples[settings] = [measure(settings)]
        while len(samples[fastest := min(samples, key=ms)]) == 1:
            samples[fastest].append(measure(fastest))
        return fastest

    best = fastest_of(Settings(fusion_mb, first_ms) for fusion_mb in thresholds_mb)
    fastest_of(Settings(best.fusion_mb, cycle_ms) for cycle_ms in others_ms)
    return {settings: ms(settings) for settings in samples}
