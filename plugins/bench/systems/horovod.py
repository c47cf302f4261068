"""Horovod in `bytesched bench`: its blocks, the sweep of its settings, and its autotuner.

Horovod reads fusion threshold, cycle time and autotuning when it starts, and a process cannot
start it again with other ones: what was set once stays set, and setting both crashes. So every
block has processes of its own. The ranks that start them wait meanwhile and use no core.
"""

from __future__ import annotations

import csv
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
from bytesched.errors import PluginError
from bytesched.lab.ranks import Place

from .data_parallel import MIB
from .processes import OwnProcesses

RANK = "bytesched.plugins.bench.systems.rank"
SWEPT_FUSION_MB = (1, 2, 4, 8, 16, 128)
#: the first is Horovod's own
SWEPT_CYCLES_MS = (1, 0.5, 5)
#: The autotuner judges a setting by the median of five samples, here of one iteration each, and
#: begins to count one iteration late.
ITERATIONS_PER_SETTING = 6
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

    def block(
        self,
        system: System,
        warmup: int,
        iterations: int,
        variables: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """What `train` found on this rank, with `variables` in Horovod's environment."""
        settings, options = split_options(system.options)
        if self._server is not None:
            self._server.init([])
        return self._processes.block(
            replace(system, options=options),
            warmup,
            iterations,
            self._network | settings.environment() | dict(variables or {}),
        )

    def autotuned(self, iterations: int) -> tuple[Settings, bool]:
        """What Horovod's autotuner found in so many iterations, and whether it was finished.

        It takes few and short samples here: with its own defaults it would need thousands of
        iterations. It tries a number of settings with the response cache off and again with it on.
        """
        tried = (iterations // ITERATIONS_PER_SETTING - 2) // 2
        log = self._processes.folder / "autotune.csv"
        variables = {
            "HOROVOD_AUTOTUNE": "1",
            "HOROVOD_AUTOTUNE_LOG": str(log),
            "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "1",
            "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "1",
            "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": str(tried - 1),
            "HOROVOD_HIERARCHICAL_ALLGATHER": "0",
        }
        self.block(System("horovod", "horovod", {}), 0, iterations, variables)
        text = [log.read_text() if self._processes.rank == 0 else ""]
        dist.broadcast_object_list(text)
        return read_autotune_log(text[0], 2 * tried)

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


def read_autotune_log(text: str, tried: int) -> tuple[Settings, bool]:
    """The settings that the autotuner of this log decided for, or the best of those it tried.

    The last row is the decision once all settings to be tried are there, `tried` of them.
    """
    rows = list(csv.DictReader(text.splitlines(), skipinitialspace=True))
    if not rows:
        raise PluginError("Horovod's autotuner tried nothing: raise --autotune-iterations")
    finished = len(rows) > tried
    best = rows[-1] if finished else max(rows, key=lambda row: float(row["score"]))
    settings = Settings(
        round(float(best["tensor_fusion_threshold"]), 2),
        round(float(best["cycle_time_ms"]), 2),
        best["cache_enabled"] == "1",
    )
    return settings, finished


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
