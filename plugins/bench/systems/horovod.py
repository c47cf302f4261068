"""Horovod in `bytesched bench`: what its blocks are told.

Horovod reads fusion threshold and cycle time when it starts, and a process cannot
start it again with other ones: what was set once stays set, and setting both crashes. So every
block has processes of its own. The ranks that start them wait meanwhile and use no core.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import cache
from itertools import groupby

from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

from bytesched.lab.ranks import Place
from bytesched.values import parse_flag

from ..rank import Ranks
from .data_parallel import MIB


def split_options(options: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """The variables that Horovod reads, for the options of a system; and what is left of these."""
    left, found = dict(options), {}
    if fusion_mb := left.pop("fusion_mb", None):
        found["HOROVOD_FUSION_THRESHOLD"] = str(round(float(fusion_mb) * MIB))
    if cycle_ms := left.pop("cycle_ms", None):
        found["HOROVOD_CYCLE_TIME"] = cycle_ms
    if not parse_flag(left.pop("cache", "1")):
        found["HOROVOD_CACHE_CAPACITY"] = "0"
    return found, left


@cache
def _rendezvous(address: str) -> RendezvousHTTPServer:
    """Where the ranks of all blocks find each other, a block after the other."""
    server = RendezvousHTTPServer((address, 0), RendezvousHandler, 0)
    # It ends with this process.
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def block_variables(ranks: Ranks, place: Place) -> dict[str, str]:
    """Of the environment of this rank in a new block, by which its ranks find each other.

    What Horovod's own launcher would set; collective.
    """
    if place.mpirun:
        return {"HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi"}
    port = 0
    if ranks.rank == 0:
        server = _rendezvous(place.address)
        server.init([])
        port = server.server_address[1]
    nodes, ports = zip(*ranks.gather((place.node, port)), strict=True)
    hosts = [HostInfo(node, len(list(these))) for node, these in groupby(nodes)]
    slot = get_host_assignments(hosts, ranks.size)[ranks.rank]
    found = create_slot_env_vars(slot)
    found |= create_run_env_vars(place.address, [place.interface], ports[0])
    return {name: str(value) for name, value in found.items() if value != ""}
