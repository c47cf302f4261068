"""Ends of an interpreter while an update is outstanding, or while somebody waits for it."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from faults_cases import (
    FAULT_STEP,
    FAULTS,
    STEPS,
    Net,
    Script,
    named,
    net,
    sgd,
    told,
    train_until_fault,
)
from faults_runner import folder, is_stopped, tell
from rank_worker import LOOPBACK, signals
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.nn.parallel import DistributedDataParallel

import bytesched

LAST_STEP = STEPS - 1


def _leave_by_sigterm() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.raise_signal(signal.SIGTERM)


ENDS: dict[str, Callable[[], object]] = {
    "destroys-group": dist.destroy_process_group,
    "sys-exit": lambda: sys.exit(3),
    "sigterm-handler": _leave_by_sigterm,
}


def checkpoint(script: Script) -> list[Tensor]:
    """What a script would save: weights and momentum."""
    state = script.optimizer.state_dict()["state"]
    return [
        *(value.clone() for value in script.model.state_dict().values()),
        *(entry["momentum_buffer"].clone() for entry in state.values()),
    ]


def leaves_with_an_update_outstanding(end: str) -> None:
    """The last update is outstanding on rank 0 when the script ends; it saves a checkpoint then.

    Rank 1 owes its last gradients until rank 0 is about to leave; or it dies then.
    """
    plain = Script()
    plain.train()
    expected = checkpoint(plain)

    def at(moment: str) -> None:
        if moment == "before_last_gradients" and dist.get_rank() == 1:
            signals().wait("rank 0 leaves")
            if end == "is-lost":
                FAULTS["kill"]()

    script = Script(at, fault_step=LAST_STEP)

    def save() -> None:
        try:
            got = checkpoint(script)
            tell(equal=all(map(torch.equal, got, expected)), values=len(got))
        except bytesched.BytesschedError as error:
            tell(checkpoint=named(error))

    atexit.register(save)
    script.wrap()
    script.train(LAST_STEP)
    crossed_before = bytesched.stats()["barrier_crossed_steps"]
    script.step = LAST_STEP
    script.one_step()
    tell(outstanding=bytesched.stats()["barrier_crossed_steps"] != crossed_before)
    signals().set("rank 0 leaves")
    ENDS.get(end, lambda: None)()


def rank_1_leaves_without_an_end(wrapped: bool) -> None:
    """As a script that used to hang at its end does; rank 0, which still computes, prints a sum."""

    def at(moment: str) -> None:
        if moment == "before_last_gradients" and dist.get_rank() == 0:
            signals().wait("rank 1 leaves")

    script = Script(at, fault_step=LAST_STEP)
    if wrapped:
        bytesched.wrap(script.optimizer, script.ddp, partition_bytes=256, credit_bytes=512)
    script.train(LAST_STEP)
    script.step = LAST_STEP
    if dist.get_rank() == 1:
        signals().set("rank 1 leaves")
    script.one_step()
    if dist.get_rank() == 1:
        os._exit(0)
    print(sum(value.double().sum().item() for value in script.model.state_dict().values()))


def takes_one_step_more() -> None:
    """Rank 1 does, and nobody is left to add its gradients to."""
    script = Script().wrap()
    script.train(STEPS + dist.get_rank())
    if dist.get_rank() == 1:
        signals().set("rank 1 has stepped")
    else:
        signals().wait("rank 1 has stepped")


def trains_in_a_child(wrapped: bool) -> None:
    """What this rank's weights are after its child has trained them; and how the child ended."""
    print(*_child(wrapped, STEPS))


def child_takes_one_step_more() -> None:
    print(_child(True, STEPS + dist.get_rank())[0])


def _child(wrapped: bool, steps: int) -> tuple[int | None, list[float]]:
    model = net().share_memory()
    rank = dist.get_rank()
    dist.destroy_process_group()
    context = torch.multiprocessing.get_context("fork")
    child = context.Process(target=_train, args=(model, rank, wrapped, steps))
    child.start()
    child.join(90.0)
    return child.exitcode, [float(p.detach().double().sum()) for p in model.parameters()]


def _train(model: Net, rank: int, wrapped: bool, steps: int) -> None:
    store = TCPStore(LOOPBACK, int(os.environ["MASTER_PORT"]), is_master=False)
    # Under names of its own: those of the parent's group are still there.
    dist.init_process_group("gloo", store=PrefixStore("child", store), rank=rank, world_size=2)
    ddp = DistributedDataParallel(model)
    optimizer = sgd(model)
    if wrapped:
        bytesched.wrap(optimizer, ddp, partition_bytes=256, credit_bytes=512, timeout_s=100.0)
    for step in range(steps):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(1000 * rank + step)
        ddp(torch.randn(4, 8, generator=generator)).square().mean().backward()
        optimizer.step()


def interrupted_at_a_gate() -> None:
    """Rank 0 waits for an update in its forward pass when Ctrl-C comes."""
    (folder() / f"pid{dist.get_rank()}").write_text(str(os.getpid()))

    def at(moment: str) -> None:
        if dist.get_rank() == 1 and moment == "before_last_gradients":
            signals().wait("in forward")
            os.kill(int((folder() / "pid0").read_text()), signal.SIGINT)
            signals().wait("interrupted")
        elif dist.get_rank() == 0 and moment == "after_step":
            script.fault_step += 1
        elif dist.get_rank() == 0 and moment == "in_forward" and script.step > FAULT_STEP:
            signals().set("in forward")

    script = Script(at).wrap()

    def train() -> None:
        try:
            script.train()
            bytesched.flush()
        except KeyboardInterrupt:
            signals().set("interrupted")
            raise

    told(train)


def forks_with_an_update_outstanding() -> None:
    """A child of rank 0, which has none of its threads, reads a weight and runs its exit."""

    def at(moment: str) -> None:
        if moment == "before_last_gradients" and dist.get_rank() == 1:
            signals().wait("rank 0 forks")
        elif moment == "after_step" and dist.get_rank() == 0:
            signals().set("rank 0 forks")
            child = os.fork()
            if child == 0:
                tell(child_sum=float(script.model.first_weight.sum()))
                # Not sys.exit: torch's own groups cannot be taken apart in a child.
                atexit._run_exitfuncs()
                os._exit(5)
            _, status = os.waitpid(child, 0)
            tell(
                child_code=os.waitstatus_to_exitcode(status),
                sum=float(script.model.first_weight.sum()),
            )

    script = Script(at).wrap()
    script.train()
    bytesched.unwrap(script.optimizer)


def pauses() -> None:
    """Rank 1 is stopped for a while, which is no fault: the numbers are those of plain DDP."""
    (folder() / f"pid{dist.get_rank()}").write_text(str(os.getpid()))
    plain = Script()
    plain.train()
    expected = checkpoint(plain)

    def at(moment: str) -> None:
        if dist.get_rank() == 1 and moment == "in_backward":
            signals().set("rank 1 stops")
            FAULTS["stop"]()
        elif dist.get_rank() == 0 and moment == "before_last_gradients":
            signals().wait("rank 1 stops")
            stopped = int((folder() / "pid1").read_text())
            while not is_stopped(stopped):
                time.sleep(0.001)
            tell(stopped=True)
            os.kill(stopped, signal.SIGCONT)

    script = Script(at).wrap()
    script.train()
    got = checkpoint(script)
    bytesched.unwrap(script.optimizer)
    tell(equal=all(map(torch.equal, got, expected)))


def store_is_stopped() -> None:
    """Rank 0 serves the store and is stopped: nobody answers questions any more."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    port = folder() / "port"
    if rank == 0:
        store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        port.write_text(str(store.port))
        signals().set("store")
    else:
        signals().wait("store")
        store = TCPStore(LOOPBACK, int(port.read_text()), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    train_until_fault(0, "stop", "before_backward")
