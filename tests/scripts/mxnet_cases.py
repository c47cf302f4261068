"""What a worker of `mxnet_cluster.Cluster` runs, in a Python that has MXNet and no torch."""

from __future__ import annotations

import faulthandler
import functools
import hashlib
import itertools
import json
import sys
import threading
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

import bytesched
from bytesched.errors import (
    InvalidTransition,
    MismatchError,
    PluginError,
    SchedulerClosed,
    SchedulerTimeout,
)
from bytesched.observe import Observer
from bytesched.plugins.stores.mxnet.engine import Held, post
from bytesched.plugins.stores.mxnet.urgency import Urgency

STEPS = 6
BATCH = 16
WAIT_S = 100.0


def training(how: str, updates: str, optimizer: str) -> dict[str, Any]:
    """Trains a model, and what it ends with; ``how``: alone, store or trainer.

    Alone, one process does what two workers and a server do, with neither. MXNet's own pushpull is
    no measure: with updates on the workers, these differ now and then.
    """
    mx.random.seed(1)
    # The initialisers take their numbers from numpy's global generator.
    np.random.seed(1)
    net = gluon.nn.HybridSequential()
    net.add(
        gluon.nn.Conv2D(4, 3, in_channels=1, activation="relu"),
        gluon.nn.Flatten(),
        gluon.nn.Dense(128, activation="relu", in_units=4 * 12 * 12),
        gluon.nn.Dense(10, in_units=128),
    )
    net.initialize(mx.init.Xavier())
    if optimizer == "adam":
        net.hybridize()
    kv = None if how == "alone" else plain_store()
    # Small enough to cut the larger weights into several chunks.
    sizes: Any = {"partition_bytes": "32KiB", "credit_bytes": "64KiB", "timeout_s": WAIT_S}
    store = bytesched.wrap(kv, **sizes) if how == "store" else kv
    settings = {"learning_rate": 0.05, **({"momentum": 0.9} if optimizer == "sgd" else {})}
    trainer = gluon.Trainer(
        net.collect_params(),
        optimizer,
        settings,
        kvstore=store,
        update_on_kvstore=updates == "server" if kv is not None else None,
    )
    if how == "trainer":
        bytesched.wrap(trainer, **sizes)
    loss_function = gluon.loss.SoftmaxCrossEntropyLoss()
    parameters = list(net.collect_params().values())
    batches = {rank: np.random.RandomState(rank) for rank in ([0, 1] if kv is None else [kv.rank])}
    losses: dict[int, float] = dict.fromkeys(batches, 0.0)
    for _ in range(STEPS):
        totals: list[Any] = []
        for rank, random in batches.items():
            x = mx.nd.array(random.rand(BATCH, 1, 14, 14))
            y = mx.nd.array(random.randint(0, 10, BATCH))
            with autograd.record():
                loss = loss_function(net(x), y)
            loss.backward()
            losses[rank] += float(loss.mean().asscalar())
            if kv is None:
                mine = [parameter.grad().copy() for parameter in parameters]
                totals = [a + b for a, b in zip(totals, mine, strict=True)] if totals else mine
        for parameter, total in zip(parameters, totals, strict=False):
            parameter.grad()[:] = total
        trainer.step(2 * BATCH)
    digest = hashlib.sha256()
    for parameter in parameters:
        digest.update(parameter.data().asnumpy().tobytes())
    if kv is not None:
        figures = bytesched.stats(trainer)
        assert figures["steps"] == STEPS
        assert int(figures["chunks"]) > 10, figures
        bytesched.flush(trainer)
        raises(PluginError, bytesched.unwrap, trainer)
    return {"weights": digest.hexdigest(), "losses": losses}


def calls() -> None:
    """Everything a store can be asked, by its values."""
    kv = scheduled(partition_bytes="4KiB", credit_bytes="8KiB")
    rank = kv.rank
    kv.init("a", mx.nd.ones((70, 70)) * (rank + 5))
    out = mx.nd.zeros((70, 70))
    kv.pull("a", out=out)
    assert (out.asnumpy() == 5).all(), "the value of worker 0"
    for step in range(3):
        kv.push("a", mx.nd.ones((70, 70)) * (rank + step))
        kv.pull("a", out=out)
        assert (out.asnumpy() == 2 * step + 1).all()
    value = mx.nd.ones((70, 70)) * (rank + 1)
    kv.pushpull("a", value, out=out)
    value[:] = 99
    assert (out.asnumpy() == 3).all(), "pushed before it was overwritten"
    kv.pushpull("a", out)
    assert (out.asnumpy() == 6).all(), "in place"
    kv.init([7, "c"], [mx.nd.zeros(3, dtype="float64"), mx.nd.zeros((2, 2))])
    numbers, square = mx.nd.zeros(3, dtype="float64"), mx.nd.zeros((2, 2))
    kv.push([7, "c"], [numbers + rank, square + 1])
    kv.pull([7, "c"], out=[numbers, square])
    assert (numbers.asnumpy() == 1).all()
    assert (square.asnumpy() == 2).all()
    # Two devices of each worker: the store sums over them as well.
    devices = [mx.nd.ones((70, 70), mx.cpu(device)) for device in range(2)]
    kv.pushpull("a", devices)
    assert all((device.asnumpy() == 4).all() for device in devices)
    kv.barrier()
    kv.close()
    kv.close()


def misuse() -> None:
    """Named errors, after which the store still works."""
    assert bytesched.unwrap(scheduled()) is plain_store()
    kv: Any = scheduled()
    value = mx.nd.ones((4, 2))
    raises(InvalidTransition, kv.push, "a", value)
    raises(InvalidTransition, kv.pull, "a", value)
    kv.init("a", value)
    raises(PluginError, bytesched.unwrap, kv)
    raises(InvalidTransition, kv.init, "a", value)
    raises(MismatchError, kv.push, "a", mx.nd.ones((2, 4)))
    raises(MismatchError, kv.pull, "a", mx.nd.ones((4, 2), dtype="float16"))
    kv.pushpull("a", value)
    assert (value.asnumpy() == 2).all()
    raises(PluginError, kv.init, "sparse", value.tostype("row_sparse"))
    kv.init("large", mx.nd.zeros(600_000))
    kv.pull("large", mx.nd.zeros(600_000))
    raises(PluginError, kv.set_optimizer, mx.optimizer.LAMB())
    raises(PluginError, bytesched.wrap, mx.nd.ones(1))
    local = mx.kv.create("local")
    assert bytesched.wrap(local) is local
    weight = gluon.Parameter("weight", shape=(2,))
    weight.initialize()
    trainer = gluon.Trainer([weight], "sgd", kvstore=None)
    with autograd.record():
        loss = weight.data().sum()
    loss.backward()
    trainer.step(1)
    raises(PluginError, bytesched.wrap, trainer)
    kv.close()
    raises(SchedulerClosed, kv.push, "a", value)


def order(policy: str) -> dict[str, Any]:
    """The order in which keys were begun, the most urgent one for worker 0 pushed last."""
    kv = scheduled(credit_bytes=16, policy=policy)
    began = Starts()
    kv._observers.add(began)
    keys = [f"layer{number}" for number in range(8)]
    kv.init(keys, [mx.nd.zeros(1000)] * len(keys))
    values = [mx.nd.ones(1000) for _ in keys]
    underway = kv._underway
    for number, key in enumerate(keys):
        kv.push(key, values[number], priority=-number if kv.rank else number)
        if number == 0:
            assert began.first.wait(WAIT_S), "nothing was begun"
        # Its turn in the queue shall not depend on the engine's threads.
        with underway._changed:
            begun = underway._changed.wait_for(lambda n=number: len(underway._held) > n, WAIT_S)
        assert begun
    began.go_on.set()
    kv.flush()
    kv.close()
    return {"order": [int(name.removeprefix("layer")) for name in began.names]}


def learned_order() -> None:
    """A trainer's parameters are as urgent as they were late in backward."""
    weights = [gluon.Parameter(name, shape=(1000,)) for name in "abc"]
    for weight in weights:
        weight.initialize()
    trainer = gluon.Trainer(weights, "sgd", kvstore=plain_store(), update_on_kvstore=False)
    bytesched.wrap(trainer, timeout_s=WAIT_S)
    trainer._init_kvstore()
    trainer._init_params()
    kv = trainer._kvstore
    # Every look at this clock is later than the last.
    kv._urgency = Urgency(itertools.count().__next__)

    def step() -> None:
        for weight in weights:
            weight.data()._fresh_grad = True
        trainer.step(1)

    step()
    kv.flush()
    backward: dict[int, Held] = {}
    computes = [threading.Event() for _ in weights]
    for number, weight in enumerate(weights):

        def begin(held: Held, number: int = number) -> None:
            backward[number] = held
            computes[number].set()

        post(begin, writes=[weight.grad()])
    step()
    for number in (1, 2, 0):
        assert computes[number].wait(WAIT_S)
        backward[number].release()
        assert weights[number].grad().wait_to_read() is None
    step()
    kv.flush()
    urgencies = [kv._slots[number].chunks[0].push_task.priority for number in range(3)]
    assert urgencies == [-2, 0, -1], urgencies
    kv.close()


def weight_waits() -> None:
    """What reads a pulled array waits for it, also if the other worker is late."""
    kv = scheduled(partition_bytes="4KiB")
    kv.init("w", mx.nd.zeros(5000))
    kv.init("go", mx.nd.zeros(1))
    out = mx.nd.zeros(5000)
    if kv.rank == 0:
        kv.pushpull("w", mx.nd.ones(5000), out=out)
        read = out + 1
        later = threading.Event()

        def ended(held: Held) -> None:
            held.release()
            later.set()

        post(ended, reads=[read])
        assert not later.is_set(), "the other worker has pushed nothing"
        kv.pushpull("go", mx.nd.ones(1))
        assert (read.asnumpy() == 4).all()
        assert later.wait(WAIT_S)
    else:
        # Only after worker 0 has asked, and in an order of its own.
        go = mx.nd.ones(1)
        kv.pushpull("go", go)
        go.wait_to_read()
        kv.pushpull("w", mx.nd.ones(5000) * 2, out=out)
        assert (out.asnumpy() == 3).all()
    kv.barrier()
    kv.close()


def different_orders() -> None:
    """Two workers with different chunks in their windows: neither waits for the other's."""
    kv = scheduled(partition_bytes="4KiB", credit_bytes="4KiB", policy="fifo")
    keys = [f"key{number}" for number in range(6)]
    kv.init(keys, [mx.nd.zeros(5000)] * len(keys))
    values = {key: mx.nd.ones(5000) for key in keys}
    for _ in range(3):
        for key in keys if kv.rank == 0 else reversed(keys):
            kv.pushpull(key, values[key])
    kv.flush()
    assert all((value.asnumpy() == 8).all() for value in values.values())
    kv.close()


def optimizer_after_init(workers: str) -> None:
    """An optimizer that needs whole keys is set when keys have been initialised, by some."""
    kv = scheduled(partition_bytes="4KiB")
    value = mx.nd.random.uniform(shape=(70, 70))
    given = value.copy()
    kv.init("a", given)
    given[:] = 0
    kv.init("never used", value)
    if str(kv.rank) in workers:
        kv.set_optimizer(mx.optimizer.LAMB(learning_rate=0.1))
    kv.push("a", mx.nd.ones((70, 70)) * (kv.rank + 1))
    kv.pull("a", out=given)
    expected = mx.nd.zeros((70, 70))
    kv.pull("never used", out=expected)
    mx.optimizer.get_updater(mx.optimizer.LAMB(learning_rate=0.1))(
        0, mx.nd.ones((70, 70)) * 3, expected
    )
    assert (given.asnumpy() == expected.asnumpy()).all()
    assert kv.stats()["chunks"] == 2, "it has whole keys"
    kv.close()


def keys_that_are_not_used() -> None:
    """Keys are made when one is used; a worker that uses none does not hold up the others."""
    kv = scheduled()
    kv.init("a", mx.nd.ones(5))
    if kv.rank == 0:
        kv.pull("a", out=(out := mx.nd.zeros(5)))
        assert (out.asnumpy() == 1).all()
    kv.close()


def server_lost(when: str) -> None:
    """Prints the error of a step, or of the first use of a key when a line has come on stdin."""
    kv = scheduled(timeout_s=2.0)
    value = mx.nd.ones(1000)
    kv.init(0, value)
    if when == "training":
        kv.barrier()
    print(when, flush=True)
    if when == "made":
        sys.stdin.readline()
    try:
        while True:
            kv.pushpull(0, value)
            value.wait_to_read()
    except SchedulerTimeout as error:
        print("raised", error, flush=True)


@functools.cache
def plain_store() -> Any:
    """MXNet's own; a process can have only one."""
    return mx.kv.create("dist_sync")


def scheduled(**fields: Any) -> Any:
    options: Any = {"timeout_s": WAIT_S, **fields}
    return bytesched.wrap(plain_store(), **options)


class Starts(Observer):
    """Notes what is sent; the first one keeps the scheduler until it may go on."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.first = threading.Event()
        self.go_on = threading.Event()

    def on_span(
        self, track: str, name: str, start_ns: int, end_ns: int, args: dict[str, Any] | None = None
    ) -> None:
        if track == "queue":
            self.names.append(name)
            self.first.set()
            assert self.go_on.wait(WAIT_S)


def raises(kind: type[Exception], call: Any, *arguments: Any) -> None:
    try:
        call(*arguments)
    except kind:
        return
    raise AssertionError(f"{call.__name__}{arguments[:1]} raised no {kind.__name__}")


if __name__ == "__main__":
    faulthandler.dump_traceback_later(2 * WAIT_S)
    for spec in sys.argv[1:]:
        name, *arguments = spec.split(":")
        found = globals()[name](*arguments) or {}
        rank = 0 if "alone" in arguments else plain_store().rank
        print(json.dumps({"case": spec, "rank": rank, **found}), flush=True)
