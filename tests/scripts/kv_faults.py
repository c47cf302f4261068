"""Run by mpirun on every rank: a store in which something goes wrong; says what each rank saw."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch
from mpi4py import MPI

from bytesched.config import Config
from bytesched.plugins.mpi_kvstore import MPIKVStore, open_store
from bytesched.plugins.stores.mpi.messages import TO_SERVER, Message, Op, push_tag
from bytesched.plugins.stores.scheduled import ScheduledKVStore

TIMEOUT_S = 5.0
RANK = MPI.COMM_WORLD.Get_rank()


def open_here() -> MPIKVStore:
    kv = open_store(timeout_s=TIMEOUT_S)
    kv.init("a", torch.zeros(100_000))
    return kv


def train(kv: MPIKVStore, steps: int) -> None:
    for _ in range(steps):
        kv.pushpull("a", torch.ones(100_000))


def worker(how: signal.Signals) -> None:
    """Worker 1 signals itself after some steps, the others go on."""
    kv = open_here()
    train(kv, 3)
    if kv.rank == 1:
        signal.raise_signal(how)
    train(kv, 10_000)


def scheduled_worker_stopped() -> None:
    kv = ScheduledKVStore(
        open_store(timeout_s=TIMEOUT_S), Config(timeout_s=4 * TIMEOUT_S, partition_bytes=100_000)
    )
    kv.init("a", torch.zeros(100_000))
    out = torch.zeros(100_000)
    for step in range(10_000):
        if step == 3 and kv.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        before = out.clone()
        try:
            kv.pushpull("a", torch.full_like(out, float(step)), out)
            kv.wait("a")
        except Exception:
            assert torch.equal(out, before), "half of a step was applied"
            raise


def server(how: signal.Signals) -> None:
    """The server, which is the last rank, tells its number to worker 0 by a file."""
    place = Path(sys.argv[2]) / "server.pid"
    if MPI.COMM_WORLD.Get_size() - 1 == RANK:
        place.write_text(str(os.getpid()))
    kv = open_here()
    train(kv, 3)
    if kv.rank == 0:
        os.kill(int(place.read_text()), how)
    train(kv, 10_000)


def worker_raises() -> None:
    kv = open_here()
    train(kv, 3)
    if kv.rank == 1:
        raise ValueError("no more data")
    train(kv, 10_000)


def worker_leaves() -> None:
    kv = open_here()
    train(kv, 3)
    if kv.rank == 1:
        kv.close()
    else:
        train(kv, 10_000)


def announced_wrong_size() -> None:
    kv = open_here()
    if kv.rank == 1:
        kv._loop.call(lambda: kv._loop.send_message(2, TO_SERVER, Message(Op.PUSH, 0, 1, nbytes=8)))
    train(kv, 10_000)


def sent_more_than_announced() -> None:
    kv = open_here()
    if kv.rank == 1:
        data = bytearray(800_000)

        def begin() -> None:
            kv._loop.send_message(2, TO_SERVER, Message(Op.PUSH, 0, 1, nbytes=400_000))
            kv._loop.send(data, 2, push_tag(0))

        kv._loop.call(begin)
        time.sleep(10 * TIMEOUT_S)
    train(kv, 10_000)


def other_settings() -> None:
    open_store(timeout_s=TIMEOUT_S, servers=1 if RANK else 2)


SIGNALLED = {
    "worker_killed": partial(worker, signal.SIGKILL),
    "worker_stopped": partial(worker, signal.SIGSTOP),
    "server_killed": partial(server, signal.SIGKILL),
    "server_stopped": partial(server, signal.SIGSTOP),
}


def main() -> None:
    faulthandler.register(signal.SIGUSR1)
    faulthandler.dump_traceback_later(20 * TIMEOUT_S, exit=True)
    name, folder = sys.argv[1:3]
    seen = {"error": "", "text": ""}
    try:
        (globals() | SIGNALLED)[name]()
    except SystemExit:
        seen["error"] = "SystemExit"
    except Exception as error:
        seen = {"error": type(error).__name__, "text": str(error)}
        raise
    finally:
        (Path(folder) / f"rank{RANK}.json").write_text(json.dumps(seen))


main()
