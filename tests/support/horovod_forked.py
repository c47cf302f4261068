"""Horovod ranks without its launcher: forked, with the rendezvous that it would serve."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping

from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer
from rank_worker import LOOPBACK
from ranks import HOROVOD, ExitedRank, ForkServer, Ranks, fork_server, run_fresh


@contextlib.contextmanager
def rendezvous(world_size: int) -> Iterator[list[dict[str, str]]]:
    """What `horovodrun --gloo` gives each rank in its environment; it serves them meanwhile."""
    server = RendezvousHTTPServer((LOOPBACK, 0), RendezvousHandler, 0)
    server.init([])
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        network = create_run_env_vars(LOOPBACK, ["lo"], server.server_address[1])
        slots = get_host_assignments([HostInfo("localhost", world_size)], world_size)
        yield [
            {name: str(value) for name, value in (create_slot_env_vars(slot) | network).items()}
            for slot in slots
        ]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class HorovodRanks(Ranks):
    def __init__(self, world_size: int, env: Mapping[str, str] | None = None) -> None:
        super().__init__(world_size)
        self._env = dict(env or {})
        self._closing = contextlib.ExitStack()
        self._slots: list[dict[str, str]] = []

    def _server(self) -> ForkServer:
        return fork_server(*HOROVOD)

    def _horovod(self, rank: int) -> dict[str, str]:
        # A rank that rests keeps the others waiting.
        patience = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "3600"}
        return self._slots[rank] | patience | self._env

    def _start(self) -> None:
        self._slots = self._closing.enter_context(rendezvous(self.world_size))
        super()._start()

    def _kill(self) -> None:
        super()._kill()
        self._closing.close()


def run_forked(
    case: Callable[..., object],
    world_size: int = 2,
    timeout_s: float = 150.0,
    env: Mapping[str, str] | None = None,
    args: tuple[object, ...] = (),
) -> list[ExitedRank]:
    """`ranks.run_fresh` on ranks of Horovod."""
    with rendezvous(world_size) as slots:
        return run_fresh(case, world_size, timeout_s, env, args, slots)
