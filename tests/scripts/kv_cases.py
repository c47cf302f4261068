"""Run by mpirun on every rank: what the store over MPI does beyond the contract."""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from threading import Event
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from dropped_models import held, is_gone, settles
from kv_training import OPTIMIZERS, batches, model_of, train
from mpi4py import MPI
from raised import raised
from torch import nn

import bytesched
from bytesched.config import Config
from bytesched.errors import SchedulerTimeout
from bytesched.plugins.mpi_kvstore import MPIKVStore, open_store
from bytesched.plugins.stores.mpi import opening as mpi_kvstore
from bytesched.plugins.stores.mpi.loop import Loop
from bytesched.plugins.stores.mpi.messages import TO_WORKER, Message, Op
from bytesched.plugins.stores.mpi.server import Server
from bytesched.plugins.stores.mpi.transfer import Answers
from bytesched.plugins.stores.scheduled import ScheduledKVStore

TIMEOUT_S = 100.0

#: what one case leaves for the next
saved: dict[str, Any] = {}


def optimizer_in_the_store() -> None:
    kv = open_store(timeout_s=TIMEOUT_S)
    kv.set_optimizer("SGD", lr=0.5, momentum=0.9)
    weight = torch.nn.Parameter(torch.arange(5.0))
    kv.init("weight", weight)
    kv.init("count", torch.zeros(1, dtype=torch.int64))
    mine = torch.optim.SGD([weight], lr=0.5, momentum=0.9)
    out = torch.empty(5)
    for step in range(4):
        if step == 2:
            kv.set_hyperparameters(lr=0.25)
            mine.param_groups[0]["lr"] = 0.25
        gradients = [torch.full((5,), float(step + rank)) for rank in range(kv.num_workers)]
        kv.pushpull("weight", gradients[kv.rank], out)
        weight.grad = torch.stack(gradients).sum(0) / kv.num_workers
        mine.step()
        assert torch.equal(out, weight.detach()), (step, out, weight)
    kv.pushpull("count", count := torch.ones(1, dtype=torch.int64))
    assert count.item() == kv.num_workers, "what has no gradient is summed"
    kv.close()


def adam_in_the_store(**options: Any) -> tuple[MPIKVStore, Callable[[], torch.Tensor]]:
    """A store, and what a step makes of its one weight."""
    kv = open_store(timeout_s=TIMEOUT_S, **options)
    kv.set_optimizer("Adam", lr=0.1)
    kv.init("weight", torch.zeros(6, dtype=torch.float64))
    gradient = torch.arange(6, dtype=torch.float64)

    def step() -> torch.Tensor:
        kv.pushpull("weight", gradient, out := torch.empty(6, dtype=torch.float64))
        return out

    return kv, step


def state_is_put_back() -> None:
    kv, step = adam_in_the_store()
    weight = [step() for _ in range(3)][-1]
    state = kv.get_state("weight")
    kv.barrier()
    expected = step()
    assert torch.equal(state["value"], weight)
    kv.set_state("weight", state)
    assert torch.equal(step(), expected)
    saved.update(state=state, expected=expected)
    kv.close()


def state_moves_to_another_store() -> None:
    kv, step = adam_in_the_store(servers=1)
    kv.set_state("weight", saved["state"])
    assert torch.equal(step(), saved["expected"])
    kv.close()


def keys_of_many_sizes_over_mpi() -> None:
    kv = ScheduledKVStore(
        open_store(timeout_s=TIMEOUT_S), Config(timeout_s=TIMEOUT_S, partition_bytes=1024)
    )
    keys = {f"k{n}": torch.zeros(n * 300 + 1, dtype=torch.bfloat16) for n in range(6)}
    for key, value in keys.items():
        kv.init(key, value)
    for step in range(4):
        for key, value in reversed(keys.items()):
            kv.push(key, torch.full_like(value, step + kv.rank))
        for key, value in keys.items():
            kv.pull(key, value)
        kv.wait()
        expected = step * kv.num_workers + sum(range(kv.num_workers))
        assert all(bool((value == expected).all()) for value in keys.values()), step
    kv.close()


def _dropped(kv: MPIKVStore) -> weakref.ref[nn.Module]:
    """A model that was wrapped and trained, and that nothing refers to any more."""
    model = model_of(0)
    optimizer = bytesched.wrap(OPTIMIZERS["sgd"](model.parameters()), model, kvstore=kv)
    train(model, optimizer, batches(kv.rank))
    return weakref.ref(model)


def a_session_ends_with_its_model(*, updates: bool = False) -> None:
    kv = open_store(timeout_s=TIMEOUT_S, updates=updates)
    kv.barrier()
    before = held()
    for _ in range(1 if updates else 4):
        model = _dropped(kv)
        assert settles(partial(is_gone, model, before)), (
            f"{model()}, threads and descriptors: {held()}, was {before}; {threading.enumerate()}"
        )
    kv.barrier()
    kv.close()


def a_session_whose_optimizer_is_in_the_store_ends_with_its_model() -> None:
    a_session_ends_with_its_model(updates=True)


def most_complete_keys_are_served_first() -> None:
    taken: list[tuple[int, int]] = []
    ends: list[Callable[[], None]] = []

    def take(rank: int, message: Message, memory: Any, then: Callable[[], None]) -> None:
        taken.append((message.key, rank))
        ends.append(then)

    #: a loop and a transfer that only remember
    fake: Any = SimpleNamespace(
        send_message=mock.Mock(), receive=lambda *given: given[-1](), forget=mock.Mock(), take=take
    )
    server = Server(fake, fake, [0, 1, 2], TIMEOUT_S)
    for key in range(6):
        what = {"name": "k", "dtype": "float32", "shape": [2]}
        server.on_message(0, Message(Op.INIT, key, body=what))
    for key in (5, 4, 3, 2, 1, 0):
        server.on_message(0, Message(Op.PUSH, key, 1, 8, priority=-key))
    server.on_message(1, Message(Op.PUSH, 5, 1, 8, priority=-5))
    assert taken == [(5, 0), (4, 0), (3, 0), (2, 0)]
    for then in ends[:3]:
        then()
    # Key 5 has one of three already; of the others 0 is more urgent than 1.
    assert taken[4:] == [(5, 1), (0, 0), (1, 0)], taken


def urgent_answers_overtake() -> None:
    sent: list[int] = []
    ends: list[Callable[[], None]] = []

    def give(rank: int, key: int, memory: Any, then: Callable[[], None]) -> None:
        sent.append(key)
        ends.append(then)

    transfer: Any = SimpleNamespace(give=give)
    answers = Answers(0, transfer)
    for key in (5, 4, 3, 2):
        answers.add(key, -key, None)
    assert sent == [5, 4], "two are on their way"
    ends[0]()
    answers.add(0, 0, None)
    ends[1]()
    assert sent == [5, 4, 2, 0], sent


def end_after_an_exception(kv: MPIKVStore) -> int:
    with (
        mock.patch.object(sys, "last_value", ValueError("no more data"), create=True),
        mock.patch.object(mpi_kvstore, "_abort") as abort,
    ):
        mpi_kvstore._at_exit(kv, kv._loop, kv._transfer)
    return abort.call_count


def an_exception_after_close_waits_for_nobody() -> None:
    kv = open_store(servers=0, timeout_s=1000.0)
    kv.close()
    assert end_after_an_exception(kv) == 0


def an_exception_ends_the_job_even_if_nobody_can_be_told() -> None:
    kv = open_store(servers=0, timeout_s=TIMEOUT_S)
    with mock.patch.object(kv, "fail_with"):
        assert end_after_an_exception(kv) == 1
    kv.close()


def ranks_that_never_open_the_store_do_not_hold_the_end() -> None:
    never: Any = SimpleNamespace(Test=lambda: False)
    with mock.patch("atexit.register") as register:
        said = raised(lambda: mpi_kvstore._poll(never, 0.01, "all"), SchedulerTimeout)
    assert "0.01 s for all" in said, said
    register.assert_called_once_with(mpi_kvstore._abort)


def a_window_that_is_never_made_does_not_hold_the_start() -> None:
    never = Event()

    open_it = partial(open_store, servers=0, transfer="one-sided", timeout_s=0.5)
    with (
        mock.patch.object(mpi_kvstore, "OneSided", side_effect=lambda *args: never.wait()),
        mock.patch("atexit.register") as register,
    ):
        said = raised(open_it, SchedulerTimeout)
    assert "0.5 s for all ranks to make their windows" in said, said
    register.assert_called_once_with(mpi_kvstore._abort)
    never.set()


class _Memory(bytearray):
    """Tells by a weak reference when it is freed."""


class _StillActive(MPI.Request):
    """As a receive from any rank when one is gone: an error to test, and MPI still fills it."""

    def Test(self, status: MPI.Status | None = None) -> bool:
        raise MPI.Exception(MPI.ERR_PENDING)


def memory_that_mpi_may_still_fill_is_not_freed() -> None:
    comm = MPI.COMM_SELF.Dup()
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    failed, sent = Event(), Event()
    loop = Loop(comm, idle_nap_s=0.001)
    role: Any = SimpleNamespace(
        fail=lambda error: failed.set(), on_tick=lambda: None, awaits=lambda: True
    )
    loop.add(role, TO_WORKER)
    memory = _Memory(8)
    kept = weakref.ref(memory)
    loop.post(_StillActive(comm.Irecv([memory, MPI.BYTE], 0, 3)), lambda: None, memory)
    del memory
    no_rank = comm.Get_size()
    loop.receive_checked(memoryview(bytearray(1)), no_rank, 3, lambda: None, "what nobody sends")
    loop.start()
    assert failed.wait(TIMEOUT_S)
    loop.call(lambda: comm.Send([b"too late", MPI.BYTE], 0, 3))
    loop.call(sent.set)
    assert sent.wait(TIMEOUT_S)
    filled = kept()
    assert filled is not None
    assert bytes(filled) == b"too late"
    loop.stop(TIMEOUT_S)


def main() -> None:
    faulthandler.register(signal.SIGUSR1)
    for name in sys.argv[1:]:
        with contextlib.suppress(SystemExit):
            globals()[name]()
    print(f"rank {MPI.COMM_WORLD.rank}: done", flush=True)


main()
