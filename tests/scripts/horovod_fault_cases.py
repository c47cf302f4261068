"""What fresh Horovod ranks do in fault tests: train until something goes wrong, or leave."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch
from faults_cases import FAULT_STEP, FAULTS, STEPS, Script, named, threads, timeout_of
from faults_runner import tell
from horovod_training import HorovodJob
from rank_worker import Launch, Signals
from torch import Tensor
from training import adamw

import bytesched
from bytesched.plugins.horovod.operations import Operations

#: of the rehearsal, however busy the machine is
REHEARSAL_TIMEOUT_S = 60.0


class HorovodScript(Script):
    def __init__(
        self,
        at: Callable[[str], object] = lambda moment: None,
        *,
        timeout_s: float,
        wrapped: bool = True,
        fault_step: int = FAULT_STEP,
    ) -> None:
        self.job = HorovodJob(wrapped=wrapped, timeout_s=timeout_s)
        super().__init__(at, fault_step=fault_step)

    def begun(self) -> tuple[Any, Any]:
        return self.model, self.job.wrap(adamw(self.model), self.model)

    def inputs(self, step: int) -> Tensor:
        return self.job.inputs(step)


def train_until_fault(victim: int, moment: str, fault: str) -> None:
    # Functions registered first run last, so this one sees what the library's own left behind.
    atexit.register(lambda: tell(threads_left=[name for name in threads() if "bytesched" in name]))

    def at(now: str) -> None:
        if now == moment and hvd.rank() == victim:
            FAULTS[fault]()
        elif now == moment:
            tell(reached=moment)

    # What a process does for the first time (imports, most of all) takes seconds on a busy machine,
    # for which the other rank would wait.
    rehearsal = HorovodScript(timeout_s=REHEARSAL_TIMEOUT_S)
    rehearsal.train(2)
    rehearsal.job.close()
    script = HorovodScript(at, timeout_s=timeout_of(fault))
    try:
        script.train(FAULT_STEP if fault == "end" and hvd.rank() == victim else STEPS)
        bytesched.flush()
    except BaseException as error:
        tell(
            **named(error),
            kinds=[kind.__name__ for kind in type(error).__mro__],
            rank=getattr(error, "rank", None),
            task=getattr(error, "task", None),
        )
        raise


def announce_until_shut_down() -> None:
    """Rank 1 shuts Horovod down while rank 0 announces one tensor after another."""
    peers = Operations(hvd.global_process_set, name="many", timeout_s=100.0)
    peers.wait(peers.allreduce(torch.zeros(1), "go", hvd.Sum))
    if hvd.rank() == 1:
        hvd.shutdown()
        return
    announced: list[Tensor] = []
    try:
        while True:
            announced.append(torch.zeros(4))
            peers.allreduce(announced[-1], f"{len(announced)}", hvd.Sum)
    except hvd.mpi_ops.HorovodInternalError as error:
        tell(message=str(error))


def leave(how: str, store_port: int) -> None:
    """The last update is outstanding on rank 0 when its script ends in one of several ways.

    Rank 1 owes its last gradients until then. The weights are compared at the very end.
    """
    scripts: list[HorovodScript] = []

    def compare() -> None:
        expected, found = (script.weights() for script in scripts)
        tell(
            equal=all(bool((a == b).all()) for a, b in zip(expected, found, strict=True)),
            threads_left=[name for name in threads() if "bytesched" in name],
        )

    # After our own handler, which is registered later, and before Horovod's.
    atexit.register(compare)
    scripts.append(HorovodScript(timeout_s=100.0, wrapped=False))
    scripts[0].train()
    launch = {"rank": hvd.rank(), "world_size": hvd.size(), "store_port": store_port}
    signals = Signals(Launch(**launch, timeout_s=100.0, output="", import_path=[]))

    def at(moment: str) -> None:
        if moment == "before_last_gradients" and hvd.rank() == 1:
            signals.wait("rank 0 leaves")

    scripts.append(HorovodScript(at, timeout_s=30.0, fault_step=STEPS - 1))
    scripts[1].train()
    signals.set(f"rank {hvd.rank()} leaves")
    if how == "shutdown":
        hvd.shutdown()
        compare()
    elif how == "sys-exit":
        sys.exit(3)
    elif how == "horovods-handler-first":
        # As after another hvd.init().
        atexit.register(hvd.mpi_ops._basics.shutdown)
