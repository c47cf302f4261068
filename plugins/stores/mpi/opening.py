"""A parameter server over MPI, in the launcher's own processes.

::

    mpirun -np 3 python train.py        # and in train.py, on every rank:
    kv = bytesched.plugins.mpi_kvstore.open_store(servers=1)

With more ranks than cores, Open MPI also needs ``--oversubscribe``.

The last ranks become servers: there the call serves until every worker has closed the store, and
then ends the process. With ``servers=0`` every rank is a worker and serves a share as well.
"""

from __future__ import annotations

import atexit
import json
import logging
import signal
import sys
import time
from typing import Any, NoReturn

import numpy as np
from mpi4py import MPI

from bytesched.errors import ConfigError, MismatchError, PeerLost, PluginError, SchedulerTimeout

from ..limited import limited
from .loop import Loop
from .messages import TO_SERVER
from .server import Server
from .transfer import OneSided, Transfer
from .worker import MPIKVStore

log = logging.getLogger("bytesched")

#: A server gives up before the workers that wait for it, so that they get its reason.
_SERVERS_SHARE = 0.75
_WORKER_NAP_S = 0.02
_SERVER_NAP_S = 0.0005
_SETTINGS_BYTES = 256
#: for the errors of other ranks to be shown before the job is ended
_GRACE_S = 1.0
#: for MPI to end this process
_ABORT_S = 5


def open_store(
    comm: Any = None,
    *,
    servers: int = 1,
    transfer: str = "two-sided",
    timeout_s: float = 1800.0,
    window_bytes: int = 1 << 28,
    updates: bool = False,
) -> MPIKVStore:
    """This worker's view of a new store; collective. On a rank that serves, it does not return.

    Args:
        comm: a communicator, COMM_WORLD if None; the store works on a copy.
        servers: how many ranks serve, the last ones; 0 if all work and serve.
        transfer: "two-sided" for messages, "one-sided" for reads from MPI windows.
        timeout_s: how long anything waits before it is an error.
        window_bytes: memory of each rank for one-sided transfers.
        updates: whether ``bytesched.wrap`` gives the optimizer to the store, so that its state
            lives on the servers and parameters come back.
    """
    settings = {
        "servers": servers,
        "transfer": transfer,
        "timeout_s": timeout_s,
        "window_bytes": window_bytes,
        "updates": updates,
    }
    base = MPI.COMM_WORLD if comm is None else comm
    size = base.Get_size()
    _check(servers, transfer, size)
    own, request = base.Idup()
    _poll(request, timeout_s, "all ranks at open_store")
    # Also a barrier: nothing is sent on the copy before every rank has it.
    _agree(base, json.dumps(settings), timeout_s)
    own.Set_errhandler(MPI.ERRORS_RETURN)
    workers = list(range(size - servers))
    serving = list(range(size - servers, size)) if servers else workers
    rank = own.Get_rank()
    loop = Loop(own, idle_nap_s=_SERVER_NAP_S if rank in serving else _WORKER_NAP_S)
    moving = Transfer(loop)
    if transfer == "one-sided":
        # MPI has no request for making a window.
        moving = limited(
            lambda: OneSided(loop, window_bytes),
            timeout_s,
            lambda: _never_came(timeout_s, "all ranks to make their windows"),
        )
    server: Server | None = None
    if rank in serving:
        server = Server(loop, moving, workers, _SERVERS_SHARE * timeout_s)
        loop.add(server, TO_SERVER)
        if rank not in workers:
            _serve(loop, server, moving)
    worker = MPIKVStore(
        loop,
        moving,
        server,
        num_workers=len(workers),
        servers=serving,
        timeout_s=timeout_s,
        updates=updates,
    )
    atexit.register(_at_exit, worker, loop, moving)
    loop.start()
    return worker


def _check(servers: int, transfer: str, size: int) -> None:
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise PluginError(
            "this MPI lets only its first thread communicate; the store has a thread of its own "
            "and needs at least MPI_THREAD_SERIALIZED"
        )
    if not 0 <= servers < size:
        raise ConfigError(
            f"{servers} servers of {size} ranks: at least one rank must work; servers=0 "
            "lets every rank work and serve"
        )
    if transfer not in ("two-sided", "one-sided"):
        raise ConfigError(f"transfer = {transfer!r}: two-sided or one-sided")


def _agree(comm: Any, text: str, timeout_s: float) -> None:
    mine = np.frombuffer(text.encode().ljust(_SETTINGS_BYTES), dtype=np.uint8)
    everyones = np.empty((comm.Get_size(), _SETTINGS_BYTES), dtype=np.uint8)
    _poll(comm.Iallgather(mine, everyones), timeout_s, "the settings of all ranks")
    for rank, other in enumerate(everyones):
        theirs = other.tobytes().decode().rstrip()
        if theirs != text:
            raise MismatchError(
                f"rank {rank} opened the store with {theirs}, rank {comm.Get_rank()} with {text}"
            )


def _poll(request: Any, timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not request.Test():
        if time.monotonic() > deadline:
            raise _never_came(timeout_s, what)
        time.sleep(0.001)


def _never_came(timeout_s: float, what: str) -> SchedulerTimeout:
    # A rank that never came would not come to MPI's end either.
    atexit.register(_abort)
    return SchedulerTimeout(f"waited {timeout_s:g} s for {what}")


def _serve(loop: Loop, server: Server, moving: Transfer) -> NoReturn:
    """Serves until every worker has left, then ends the process."""
    server.on_empty = lambda: loop.stop(_GRACE_S)
    loop.run()
    if server.error is None:
        atexit.register(moving.release)
        raise SystemExit(0)
    atexit.register(_abort)
    raise server.error


def _at_exit(worker: MPIKVStore, loop: Loop, moving: Transfer) -> None:
    if worker.is_closed and worker.error is None and loop.has_ended:
        moving.release()
        return
    died = getattr(sys, "last_value", None)
    if worker.error is None and died is None:
        try:
            worker.close()
        except Exception:
            log.exception("the store could not be closed")
    elif worker.error is None:
        reason = f"{type(died).__name__}: {died}"
        worker.fail_with(PeerLost(f"worker {worker.rank} ended with {reason}"))
    if worker.error is not None:
        worker.close()
    # Also if the loop is stuck in MPI and sent nothing: MPI's end would be stuck, too.
    if worker.error is not None or died is not None or not loop.has_ended:
        _abort()
    moving.release()


def _abort() -> None:
    """Ends the job: MPI's own end waits for every rank, also for those that are gone.

    Under ``mpirun --enable-recovery`` an abort ends this rank alone, so each has to end by itself.
    """
    # From here on nothing may hold this process: a full pipe, or an abort that waits for the dead,
    # as Open MPI's does with fault tolerance on.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    signal.alarm(_ABORT_S)
    sys.stdout.flush()
    sys.stderr.flush()
    # The messages to the others have been given to MPI, which delivers them meanwhile.
    time.sleep(_GRACE_S)
    MPI.COMM_WORLD.Abort(1)
