"""A store as a wire: sums, what ranks tell each other, errors, keys that go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from together import TIMEOUT_S, together

from bytesched.config import Config
from bytesched.errors import SchedulerTimeout, TransportError
from bytesched.kvstore import Ended, Key, LocalKVStore
from bytesched.kvstore.pipes import Pipes
from bytesched.plugins.stores.training.wire import StoreWire
from bytesched.urgency import urgent

CONFIG = Config(partition_bytes=64, credit_bytes=64, timeout_s=TIMEOUT_S)


def wire_over(store: Any, *, timeout_s: float = TIMEOUT_S) -> StoreWire:
    wire = StoreWire(store, name="s", config=replace(CONFIG, timeout_s=timeout_s))
    wire.limit(CONFIG.credit_bytes)
    return wire


class Held:
    """One worker's store that ends nothing by itself."""

    rank, num_workers = 0, 1

    def __init__(self) -> None:
        self.keys: list[Key] = []
        self.pushes: list[tuple[Key, int, Ended]] = []
        self.pulls: list[tuple[Key, Any, Ended]] = []

    def init(self, key: Key, value: Any) -> None:
        self.keys.append(key)

    def delete(self, key: Key) -> None:
        self.keys.remove(key)

    def start_push(self, key: Key, value: Any, ended: Ended, priority: int = 0) -> None:
        self.pushes.append((key, priority, ended))

    def start_pull(self, key: Key, out: Any, ended: Ended, priority: int = 0) -> None:
        self.pulls.append((key, out, ended))

    def close(self) -> None:
        pass


@pytest.fixture
def held() -> Iterator[tuple[Held, StoreWire]]:
    store = Held()
    wire = wire_over(store, timeout_s=0.2)
    yield store, wire
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


def test_what_was_cut_last_goes_first_among_what_waits(held: tuple[Held, StoreWire]) -> None:
    store, wire = held
    works = [wire.start(torch.zeros(16), f"{n} of 16") for n in range(3)]
    order = []
    for _ in works:
        # The window has room for one.
        while not store.pushes:
            pass
        key, _, ended = store.pushes.pop()
        order.append(str(key).split()[0])
        ended(None)
    assert order == ["s/0", "s/2", "s/1"]


def test_a_key_of_another_size_takes_the_place_of_the_old_one(
    held: tuple[Held, StoreWire],
) -> None:
    store, wire = held
    names = [wire.name(torch.zeros(size), f"0 of {size}") for size in (4, 4, 6)]
    assert names[0] == names[1] != names[2]
    assert store.keys == [names[2]]


def test_a_wait_has_an_end_and_says_what_for(held: tuple[Held, StoreWire]) -> None:
    _, wire = held
    with pytest.raises(SchedulerTimeout, match=r"waited 0\.2 s for the store \(task layer"):
        wire.wait(wire.start(torch.zeros(4), "0 of 4"), "layer")
    with pytest.raises(SchedulerTimeout, match=r"waited 0\.4 s for the store \(task 1 of 4"):
        wire.sum(torch.zeros(4), "1 of 4")


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
