"""Run by mpirun on every rank: the contract over real processes, for one way of opening a store."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import sys
from typing import Any

import torch
from mpi4py import MPI

from bytesched.config import Config
from bytesched.kvstore import Key, KVStore
from bytesched.plugins.mpi_kvstore import open_store
from bytesched.plugins.stores.scheduled import ScheduledKVStore
from bytesched.testing import KVStoreContract

TIMEOUT_S = 100


class Suite(KVStoreContract):
    def __init__(self, options: dict[str, Any], *, scheduled: bool) -> None:
        self.options = options
        self.scheduled = scheduled

    def store(self) -> KVStore:
        kv = open_store(timeout_s=TIMEOUT_S, **self.options)
        if self.scheduled:
            return ScheduledKVStore(kv, Config(timeout_s=TIMEOUT_S, partition_bytes=16))
        return kv

    def array(self, numbers: list[float]) -> Any:
        return torch.tensor(numbers)

    def numbers(self, array: Any) -> list[float]:
        return [float(number) for number in array]

    def wait(self, kv: KVStore, key: Key) -> None:
        if isinstance(kv, ScheduledKVStore):
            kv.wait(key)


def main() -> None:
    names = sorted(name for name in dir(Suite) if name.startswith("test_"))
    for options in json.loads(sys.argv[1]):
        scheduled = options.pop("scheduled", False)
        for name in names:
            # Before a call's limit: a rank that is silent for so long shows where it is.
            faulthandler.dump_traceback_later(TIMEOUT_S - 10)
            # A server ends with it.
            with contextlib.suppress(SystemExit):
                getattr(Suite(options, scheduled=scheduled), name)()
            faulthandler.cancel_dump_traceback_later()
    print(f"rank {MPI.COMM_WORLD.rank}: {len(names)} passed", flush=True)


main()
