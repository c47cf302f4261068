"""Torch trained through a store within one process: sums, their errors, and figures."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from looped import SMALL, TIMEOUT_S, inputs, mlp, sgd, weights
from together import together
from torch import Tensor, nn

from bytesched.config import Config
from bytesched.errors import TransportError
from bytesched.kvstore import Key, LocalKVStore
from bytesched.plugins.planned import session as planned_session
from bytesched.plugins.proxies.passes import Watcher, watch_passes
from bytesched.plugins.stores.training import begin as kvstore_training

STEPS = 5
CONFIG = Config(timeout_s=TIMEOUT_S, **SMALL)


@pytest.fixture(autouse=True)
def workers_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As processes have passes of their own: a session lands before every pass that it sees."""

    def watch(watcher: Watcher) -> Callable[[], None]:
        return watch_passes(watcher, thread=threading.get_ident())

    monkeypatch.setattr(planned_session, "watch_passes", watch)


class View:
    """One worker's view of a store, whose pushes may be made to fail."""

    def __init__(self, view: LocalKVStore) -> None:
        self._view = view
        #: raised by every push
        self.error: Exception | None = None

    def push(self, key: Key, value: Any, priority: int = 0) -> None:
        if self.error is not None:
            raise self.error
        self._view.push(key, value, priority)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)


def trained_plain() -> list[Tensor]:
    """With the mean gradient of two workers, which is exact in any order."""
    model = mlp()
    optimizer = sgd(model)
    for step in range(STEPS):
        gradients = []
        for rank in range(2):
            optimizer.zero_grad()
            model(inputs(1000 * rank + step)).square().mean().backward()
            gradients.append([p.grad for p in model.parameters() if p.grad is not None])
        for parameter, mine, other in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = mine / 2 + other / 2
        optimizer.step()
    return weights(model)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(inputs(1000 * rank + step)).square().mean().backward()
        optimizer.step()


def test_two_workers_have_the_bits_of_their_mean_and_one_scheduling_thread_each() -> None:
    views = [View(view) for view in LocalKVStore.group(2, timeout_s=TIMEOUT_S)]
    models = [mlp(), mlp()]
    both_run = threading.Barrier(2)
    schedulers: list[int] = []

    def worker(rank: int) -> dict[str, int | float | str]:
        optimizer = sgd(models[rank])
        session = kvstore_training.attach(optimizer, models[rank], views[rank], CONFIG)
        train(models[rank], optimizer, rank, range(STEPS))
        both_run.wait(TIMEOUT_S)
        names = [thread.name for thread in threading.enumerate()]
        schedulers.append(names.count("bytesched-scheduler"))
        both_run.wait(TIMEOUT_S)
        session.flush()
        stats = session.stats()
        session.close()
        return stats

    for stats in together(worker):
        assert stats["mode"] == "cross"
        assert stats["order"] == "each worker's own"
        assert float(stats["chunks"]) > 4
        assert float(stats["comm_ms"]) > 0
        assert float(stats["scheduler_cpu_us_per_chunk"]) > 0
    assert schedulers == [2, 2]
    expected = trained_plain()
    for model in models:
        assert all(map(torch.equal, expected, model.parameters()))


def test_compressed_gradients_are_rounded_on_their_way() -> None:
    rounded, model = mlp(), mlp()
    plain, optimizer = sgd(rounded), sgd(model)
    config = Config(**{**CONFIG.__dict__, "compression": "bf16"})
    session = kvstore_training.attach(optimizer, model, LocalKVStore(), config)
    train(model, optimizer, 0, range(STEPS))
    session.flush()
    for step in range(STEPS):
        plain.zero_grad()
        rounded(inputs(step)).square().mean().backward()
        for parameter in rounded.parameters():
            assert parameter.grad is not None
            parameter.grad = parameter.grad.bfloat16().float()
        plain.step()
    assert all(map(torch.equal, rounded.parameters(), model.parameters()))
    session.close()


def test_an_error_of_the_store_is_raised_where_the_user_waits() -> None:
    views = [View(view) for view in LocalKVStore.group(2, timeout_s=TIMEOUT_S)]
    models = [mlp(), mlp()]

    def worker(rank: int) -> str:
        optimizer = sgd(models[rank])
        session = kvstore_training.attach(optimizer, models[rank], views[rank], CONFIG)
        train(models[rank], optimizer, rank, range(2))
        session.flush()
        if rank:
            views[rank].error = TransportError("the server is on fire", task="a chunk", rank=rank)
        with pytest.raises(Exception, match=r"on fire|left") as raised:
            train(models[rank], optimizer, rank, range(2, STEPS))
        session.close(release_parameters=False)
        return str(raised.value)

    first, second = together(worker)
    assert "worker 1 left" in first
    assert "the server is on fire" in second
