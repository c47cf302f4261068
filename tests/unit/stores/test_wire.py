"""A store as a wire: sums, errors, keys that go; and sizes of chunks, from the rate of pushes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from together import TIMEOUT_S, together

from bytesched.config import Config
from bytesched.errors import SchedulerTimeout, TransportError
from bytesched.kvstore import Key, LocalKVStore
from bytesched.kvstore.pipes import Pipes, chunks_on_their_way
from bytesched.plugins.stores.training import begin as kvstore_training
from bytesched.plugins.stores.training.begin import push_bytes_per_s
from bytesched.plugins.stores.training.wire import StoreWire
from bytesched.urgency import urgent

CONFIG = Config(partition_bytes=64, credit_bytes=64, timeout_s=TIMEOUT_S)


def wire_over(store: Any, *, timeout_s: float = TIMEOUT_S) -> StoreWire:
    wire = StoreWire(store, name="s", config=replace(CONFIG, timeout_s=timeout_s))
    wire.limit(CONFIG.credit_bytes)
    return wire


@pytest.fixture
def held(held_store: Any) -> Iterator[StoreWire]:
    """One whose store ends nothing by itself."""
    wire = wire_over(held_store, timeout_s=0.2)
    yield wire
    wire.close()


def test_sums_and_the_largest_numbers_of_all() -> None:
    views = LocalKVStore.group(3, timeout_s=TIMEOUT_S)

    def work(rank: int) -> list[list[float]]:
        wire = wire_over(views[rank])
        tensors = [torch.full((4,), float(rank + n)) for n in range(3)]
        works = [wire.start(tensor, f"{n} of 4") for n, tensor in enumerate(tensors)]
        told = []
        for _ in range(2):
            # With one key: the second waits for the first.
            told.append(torch.tensor([float(rank), -float(rank), float("inf")]).double())
            works.append(wire.start_largest(told[-1]))
        for one in works:
            wire.wait(one, "all")
            assert one.is_completed()
        wire.close()
        return [tensor.tolist() for tensor in (*tensors, *told)]

    largest = [2.0, 0.0, float("inf")]
    expected = [[3.0] * 4, [6.0] * 4, [9.0] * 4, largest, largest]
    assert together(work, 3) == [expected] * 3


def test_what_was_cut_last_goes_first_among_what_waits(held: StoreWire, held_store: Any) -> None:
    works = [held.start(torch.zeros(16), f"{n} of 16") for n in range(3)]
    order = []
    for _ in works:
        # The window has room for one.
        while not held_store.pushes:
            pass
        key, ended = held_store.pushes.pop()
        order.append(str(key).split()[0])
        ended(None)
    assert order == ["s/0", "s/2", "s/1"]


def test_a_key_of_another_size_takes_the_place_of_the_old_one(
    held: StoreWire, held_store: Any
) -> None:
    names = [held.name(torch.zeros(size), f"0 of {size}") for size in (4, 4, 6)]
    assert names[0] == names[1] != names[2]
    assert held_store.keys == [names[2]]


def test_a_wait_has_an_end_and_says_what_for(held: StoreWire) -> None:
    with pytest.raises(SchedulerTimeout, match=r"waited 0\.2 s for the store \(task layer"):
        held.wait(held.start(torch.zeros(4), "0 of 4"), "layer")
    with pytest.raises(SchedulerTimeout, match=r"waited 0\.4 s for the store \(task 1 of 4"):
        held.sum(torch.zeros(4), "1 of 4")


def test_an_error_ends_all_that_is_under_way_and_all_that_follows() -> None:
    class OnFire(LocalKVStore):
        def push(self, key: Key, value: Any, priority: int = 0) -> None:
            raise TransportError("the server is on fire")

    wire = wire_over(OnFire())
    works = [wire.start(torch.zeros(4), f"{n} of 4") for n in range(1)]
    for work in works:
        with pytest.raises(TransportError, match="on fire"):
            wire.wait(work, "a chunk")
    with pytest.raises(TransportError, match="on fire"):
        wire.start(torch.zeros(4), "0 of 4")
    wire.wait_left(works)
    wire.close()


def test_who_waits_in_an_urgent_section_lets_chunks_go() -> None:
    wire = wire_over(LocalKVStore())
    with urgent("a section"):
        wire.wait(wire.start(torch.ones(4), "0 of 4"), "a chunk")
    wire.close()


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_section_holds_no_order_of_all_workers(is_shared: bool) -> None:
    announce = (lambda tasks: None) if is_shared else None
    pipes = Pipes(LocalKVStore(), policy="fifo", credit_bytes=1, timeout_s=10.0, announce=announce)
    with urgent("a section"):
        assert ("held" in repr(pipes.pushes)) is not is_shared
    pipes.close()


PAGE_BYTES = 4096


def sizes(
    monkeypatch: pytest.MonkeyPatch,
    bytes_per_s: float,
    servers: int = 1,
    width: int = 512,
    **settings: int,
) -> tuple[int, int]:
    """``(partition_bytes, credit_bytes)`` of a session over so fast a store."""

    class Spread(LocalKVStore):
        num_servers = servers

    def rate(wire: StoreWire, servers: int) -> float:
        assert bytes_per_s, "the store was probed"
        return bytes_per_s

    monkeypatch.setattr(kvstore_training, "push_bytes_per_s", rate)
    model = torch.nn.Linear(width, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = Config(timeout_s=TIMEOUT_S, **settings)  # type: ignore[arg-type]
    session = kvstore_training.attach(optimizer, model, Spread(), config)
    for _ in range(2):
        # Figures are of rounds after the first one.
        model(torch.ones(1, width)).sum().backward()
        optimizer.step()
    session.flush()
    stats = session.stats()
    session.close()
    return int(stats["partition_bytes"]), int(stats["credit_bytes"])


def test_chunks_grow_with_the_root_of_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, window_bytes = sizes(monkeypatch, 1e9)
    fast, _ = sizes(monkeypatch, 4e9)
    assert abs(fast - 2 * slow) <= 2 * PAGE_BYTES
    assert slow % PAGE_BYTES == fast % PAGE_BYTES == 0
    assert window_bytes == chunks_on_their_way(1) * slow


def test_chunks_are_smaller_where_more_are_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = sizes(monkeypatch, 1e10, servers=1)
    several, window_bytes = sizes(monkeypatch, 1e10, servers=3)
    assert several < one
    assert window_bytes == chunks_on_their_way(3) * several


def test_chunks_of_any_store_have_a_sensible_size(monkeypatch: pytest.MonkeyPatch) -> None:
    (least, _), (most, _) = sizes(monkeypatch, 1.0), sizes(monkeypatch, 1e18)
    assert 2**12 < least < most < 2**25


def test_sizes_that_are_given_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    small = partial(sizes, monkeypatch, width=64)  # or there would be a thousand chunks
    assert small(0.0, partition_bytes=8192) == (8192, 2 * 8192)
    assert small(1e9, credit_bytes=8192) == (8192, 8192)
    assert small(1e9, credit_bytes=9000) == (8192, 9000)
    assert small(1e9, credit_bytes=900) == (900, 900)


class Watched:
    """A worker's view of a store, and the keys that it has made and not deleted."""

    def __init__(self, view: LocalKVStore, *, deletes: bool) -> None:
        self._view = view
        self._deletes = deletes
        self.kept: set[Key] = set()

    def init(self, key: Key, value: Any) -> None:
        self.kept.add(key)
        self._view.init(key, value)

    def _delete(self, key: Key) -> None:
        self.kept.remove(key)
        self._view.delete(key)

    def __getattr__(self, name: str) -> Any:
        if name != "delete":
            return getattr(self._view, name)
        if not self._deletes:
            raise AttributeError(name)
        return self._delete


@pytest.mark.parametrize(("servers", "deletes"), [(1, True), (2, True), (1, False)])
def test_workers_measure_one_rate_again_and_again_and_delete_the_probes(
    servers: int, deletes: bool
) -> None:
    views = [Watched(v, deletes=deletes) for v in LocalKVStore.group(2, timeout_s=TIMEOUT_S)]

    def measure(rank: int) -> list[float]:
        wire = StoreWire(views[rank], name="s", config=Config(timeout_s=TIMEOUT_S))
        found = [push_bytes_per_s(wire, servers) for _ in range(2)]
        wire.close()
        return found

    first, second = together(measure)
    assert first == second
    assert min(first) > 0
    probes = [key for view in views for key in view.kept if "probe" in str(key)]
    assert bool(probes) is not deletes
