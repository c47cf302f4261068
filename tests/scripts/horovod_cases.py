"""What Horovod ranks do in tests that look at facts instead of at equal numbers."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import horovod.torch as hvd
import torch
from horovod_order_cases import planning_of
from horovod_training import HorovodJob, ScriptedHorovodJob
from looks import weight
from peer_scripts import contracted, footprint
from plugin_suite import PluginContract, TrainingRun
from rank_worker import signals
from torch import Tensor, nn
from training import adamw, closure_of, frozen, listening, mlp, sgd, train

import bytesched
from bytesched.plugins.horovod import ScheduledOptimizer
from bytesched.plugins.planned.hooked_session import HookedSession
from bytesched.plugins.registry import session_of
from bytesched.tunable import Setting

#: of waits that something else has to end: beyond the limit of a case
NO_TIMEOUT_S = 300.0


class HorovodContract(PluginContract):
    def training(self) -> TrainingRun:
        job = HorovodJob(wrapped=True)
        model = job.ddp(mlp())
        optimizer = job.distributed(adamw(model), model)
        return contracted(
            job,
            model,
            optimizer,
            job.wrap,
            attributes=lambda: sorted(vars(optimizer)),
            reduced=lambda: len(optimizer._requires_update),
            shutdown=lambda: hvd.mpi_ops.mpi_lib.horovod_torch_reset.__class__.__name__,
        )


def plugin_contract(name: str) -> None:
    getattr(HorovodContract(), name)()


def words() -> nn.Sequential:
    """A sparse gradient, which stays with Horovod, behind dense ones."""
    return nn.Sequential(nn.Embedding(12, 8, sparse=True), nn.Linear(8, 4))


def tokens(step: int) -> Tensor:
    return torch.arange(6) + step % 3


def cpu_of_python_s() -> float:
    """CPU seconds of this process but for Horovod's own thread, which negotiates all the time."""
    ticks = 0
    for thread in threading.enumerate():
        # A fork leaves the main thread's `native_id` as it was.
        number = os.getpid() if thread is threading.main_thread() else thread.native_id
        stat = Path(f"/proc/self/task/{number}/stat").read_text()
        ticks += sum(map(int, stat.rpartition(")")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def cpu_while_waiting(how: str, seconds: float) -> float:
    """CPU seconds that rank 0 burns while it waits `seconds` for rank 1's backward pass."""
    job = HorovodJob(wrapped=True, timeout_s=NO_TIMEOUT_S)
    model = job.ddp(words() if how == "sparse" else mlp())
    inputs = tokens if how == "sparse" else job.inputs
    optimizer = job.wrap(sgd(model, momentum=0.0), model)
    train(job, model, optimizer, steps=3, inputs=inputs)
    optimizer.zero_grad()
    loss = model(inputs(3)).square().mean()
    if job.rank:
        signals().wait("go")
        loss.backward()
        optimizer.step()
        job.close()
        return 0.0
    loss.backward()
    timer = threading.Timer(seconds, lambda: signals().set("go"))
    timer.start()
    began_s = cpu_of_python_s()
    if how == "read":
        optimizer.step()
        frozen(weight(model))
    else:
        optimizer.synchronize()
    burnt_s = cpu_of_python_s() - began_s
    timer.join()
    if how != "read":
        with optimizer.skip_synchronize():
            optimizer.step()
    job.close()
    return burnt_s


def gave_up_waiting_for_sparse(who: int) -> dict[str, Any]:
    """The other rank has reduced all but its sparse gradient, which it keeps from rank `who`."""
    job = HorovodJob(wrapped=True, timeout_s=4 if hvd.rank() == who else NO_TIMEOUT_S)
    model: Any = words()
    optimizer = job.wrap(sgd(model, momentum=0.0), model)
    train(job, model, optimizer, steps=3, inputs=tokens)
    if job.rank != who:
        model[0].weight.register_hook(lambda grad: signals().wait("timed out"))
    told = refusal(lambda: train(job, model, optimizer, steps=1, inputs=tokens))
    signals().set("timed out")
    refusal(job.close)
    hvd.barrier()
    return told


def refusal(do: Callable[[], object]) -> dict[str, Any]:
    """The error that `do` raised, as facts."""
    try:
        do()
    except Exception as error:  # noqa: BLE001 (told to the test)
        return {
            "kinds": [kind.__name__ for kind in type(error).__mro__],
            "message": str(error),
            "rank": getattr(error, "rank", None),
            "task": getattr(error, "task", None),
        }
    return {}


def different_on_rank_1(kind: str) -> dict[str, Any]:
    """`wrap` of a model or with settings that are not the same everywhere."""
    job = HorovodJob(wrapped=True, timeout_s=NO_TIMEOUT_S)
    differs = kind if job.rank == 1 else ""
    models: dict[str, Callable[[], nn.Module]] = {
        "layers": lambda: nn.Sequential(mlp(), nn.Linear(4, 2)),
        "shape": lambda: nn.Sequential(nn.Linear(8, 17), *list(mlp())[1:]),
        "dtype": lambda: mlp().double(),
    }
    fields: dict[str, dict[str, Any]] = {
        "partition_bytes": {"partition_bytes": 512, "credit_bytes": 512},
        "policy": {"policy": "fifo"},
        "passes": {"horovod": {"backward_passes_per_step": 2}},
        "op": {"horovod": {"op": "Sum"}},
        "predivide": {"horovod": {"gradient_predivide_factor": 2.0}},
        "compression": {"horovod": {"compression": "fp16"}},
    }
    model = models.get(differs, mlp)()
    if differs == "frozen":
        next(model.parameters()).requires_grad_(False)
    optimizer = adamw(model) if differs == "optimizer" else sgd(model)
    told = refusal(lambda: job.wrap(optimizer, model, **fields.get(differs, {})))
    hvd.barrier()
    return told


class Hidden(nn.Module):
    """An embedding that does not say that its gradients may be sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Parameter(torch.ones(12, 8)), nn.Linear(8, 4)
        self.sparse = False

    def forward(self, tokens: Tensor) -> Any:
        return self.head(nn.functional.embedding(tokens, self.table, sparse=self.sparse))


def unannounced_sparse(who: tuple[int, ...], in_step: int) -> dict[str, Any]:
    job = HorovodJob(wrapped=True, timeout_s=NO_TIMEOUT_S)
    model = Hidden()
    optimizer = job.wrap(sgd(model, momentum=0.0), model)

    def tokens(step: int) -> Tensor:
        model.sparse = step == in_step and job.rank in who
        return torch.arange(6) + step

    told = refusal(lambda: train(job, model, optimizer, inputs=tokens))
    refusal(job.close)
    return told


def job_to_fail(*, tuned: bool, timeout_s: float = NO_TIMEOUT_S) -> HorovodJob:
    """A wrapped job; tuned, rank 0 has a word before every step, and it is another cut."""
    if not tuned:
        return HorovodJob(wrapped=True, timeout_s=timeout_s)
    turns = [(Setting(256 << step % 2, 1024), 1) for step in range(10)]
    return ScriptedHorovodJob(wrapped=True, timeout_s=timeout_s, turns=turns)


def wait_until_nothing_is_sent(model: nn.Module) -> None:
    session = session_of(model)
    assert isinstance(session, HookedSession)
    chunks = [chunk for bucket in session.source.buckets for chunk in bucket.chunks]
    while not all(chunk.work is None or chunk.work.is_completed() for chunk in chunks):
        time.sleep(1e-3)


def caught(
    who: int, moment: str, in_step: int, tuned: bool, compression: str = "none"
) -> dict[str, Any]:
    """Rank `who` catches an error of its own in the middle of a step, and never trains again."""
    job = job_to_fail(tuned=tuned)
    model = mlp()
    optimizer = job.wrap(sgd(model), model, compression=compression)
    boom = False

    def trip(grad: Tensor) -> None:
        if boom:
            if moment == "when nothing is under way":
                wait_until_nothing_is_sent(model)
            raise ArithmeticError("boom")

    def watch(_: nn.Module, __: object, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(trip)

    def inputs(step: int) -> Tensor:
        nonlocal boom
        boom = step == in_step and job.rank == who
        return job.inputs(step)

    def run() -> None:
        train(job, model, optimizer, steps=5, inputs=inputs)
        bytesched.flush()

    model[2].register_forward_hook(watch)
    told = refusal(run)
    if job.rank == who and moment == "in the next forward pass":
        told["again"] = refusal(lambda: model(job.inputs(9)))
    refusal(job.close)
    return told


def failed_update(who: int, tuned: bool, is_owed: bool) -> dict[str, Any]:
    """The update of one layer raises on rank `who`, which unwraps and lives on.

    Owed, it is made in the next forward pass: the other rank keeps its last gradient until then.
    Else it is made in `step()`, as all gradients are there.
    """
    job = job_to_fail(tuned=tuned)
    model = mlp()
    optimizer = job.wrap(sgd(model), model)
    steps = 0

    def last_gradient(_: Tensor) -> None:
        if steps == 3 and job.rank != who and is_owed:
            signals().wait("owed")

    def before_step(step: int) -> None:
        if step == 3 and job.rank == who and not is_owed:
            wait_until_nothing_is_sent(model)

    def after_step(step: int) -> None:
        nonlocal steps
        steps = step + 1
        if step == 2 and job.rank == who:
            # What was owed before is made when the state is looked at.
            optimizer.state[model[4].weight]["momentum_buffer"] = torch.zeros(3)
        elif step == 3 and job.rank == who:
            signals().set("owed")

    next(model.parameters()).register_hook(last_gradient)
    told = refusal(
        lambda: train(
            job, model, optimizer, steps=8, before_step=before_step, after_step=after_step
        )
    )
    told["steps"] = steps
    refusal(job.close)
    return told


def gave_up_waiting(who: int, after_steps: int, tuned: bool) -> dict[str, Any]:
    job = job_to_fail(tuned=tuned, timeout_s=4 if hvd.rank() == who else NO_TIMEOUT_S)
    model = mlp()
    optimizer = job.wrap(sgd(model), model, credit_bytes=1 << 20)
    train(job, model, optimizer, steps=after_steps)
    if job.rank != who:
        signals().wait("unwrapped")
    told = refusal(lambda: train(job, model, optimizer, steps=3))
    refusal(job.close)
    signals().set("unwrapped")
    hvd.barrier()
    return told


class Rounded(hvd.Compression.fp16):  # type: ignore[misc]
    """A compressor that nobody has heard of."""


def left_as_it_was(kind: str) -> dict[str, Any]:
    """`wrap` of what cannot be scheduled: what it said, and whether plain Horovod still trains."""
    autotunes = {"HOROVOD_AUTOTUNE": "1"} if kind == "autotune" else {}
    horovod: dict[str, Any] = {"adasum": {"op": "Adasum"}, "compressor": {"compression": Rounded}}
    fields: dict[str, Any] = {"bf16": {"compression": "bf16"}, "disabled": {"enabled": False}}
    with listening() as said, mock.patch.dict(os.environ, autotunes):
        job = HorovodJob(wrapped=True)
        model = job.ddp(nn.Embedding(12, 8, sparse=True) if kind == "sparse" else mlp())
        optimizer = job.distributed(sgd(model, momentum=0.0), model, **horovod.get(kind, {}))
        before = footprint(model, optimizer)
        same = bytesched.wrap(optimizer, model, **fields.get(kind, {})) is optimizer
        untouched = footprint(model, optimizer) == before
        for step in range(2):
            x = torch.arange(6) if kind == "sparse" else job.inputs(step)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        weights = [p.detach().double().sum() for p in model.parameters()]
        theirs = [hvd.allreduce(w, name=f"theirs {i}") for i, w in enumerate(weights)]
        return {
            "said": said,
            "untouched": same and untouched,
            "mode": bytesched.stats(optimizer)["mode"],
            "equal": all(torch.equal(a, b) for a, b in zip(weights, theirs, strict=True)),
        }


def prints_what_is_left(kind: str) -> None:
    print(json.dumps(left_as_it_was(kind)))


def joined_while_tuned() -> dict[str, Any]:
    """Rank 0 has fewer batches, and sizes change all the time."""
    job = job_to_fail(tuned=True)
    model = mlp()
    optimizer = job.wrap(sgd(model), model)
    train(job, model, optimizer, steps=3)

    def run() -> None:
        if job.rank:
            train(job, model, optimizer, first_step=3, steps=6)
            bytesched.flush()
        hvd.join()

    told = refusal(run)
    refusal(job.close)
    return told


def planned_order(steps: int) -> list[int] | None:
    job = HorovodJob(wrapped=True, partition_bytes=256)
    model = mlp()
    train(job, model, job.wrap(sgd(model), model), steps=steps)
    order: list[int] | None = planning_of(model).order
    job.close()
    return order


def wrapped_by_class_name() -> tuple[bool, str]:
    """Whether ByteScheduler's own name returns what it was given, and the mode it trains in."""
    job = HorovodJob(wrapped=True)
    model = job.ddp(mlp())
    optimizer = job.distributed(sgd(model), model)
    is_same = ScheduledOptimizer(optimizer, model, partition_bytes=256) is optimizer
    train(job, model, optimizer, steps=2)
    mode = str(bytesched.stats(optimizer)["mode"])
    bytesched.unwrap(optimizer)
    return is_same, mode


def weights_after_closures() -> Any:
    """Weights trained through closures that run backward, on which plain Horovod's ranks differ."""
    job = HorovodJob(wrapped=True)
    model, optimizer = job.begin(sgd)
    for step in range(4):
        optimizer.step(closure_of(job, model, optimizer, step))
    weights = frozen(model.state_dict())
    job.close()
    return weights
