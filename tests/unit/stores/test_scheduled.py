"""Stores within one process: the contract, two pipes, and the scheduled store over them."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest
import torch
from together import TIMEOUT_S, together

from bytesched.config import Config
from bytesched.errors import MismatchError, PeerLost, PluginError, SchedulerClosed, SchedulerTimeout
from bytesched.kvstore import Ended, Key, KVStore, LocalKVStore, describe
from bytesched.kvstore.local import _Entry
from bytesched.kvstore.pipes import chunks_on_their_way
from bytesched.observe import Observer, Observers
from bytesched.plugins.ending import wait_for_ends
from bytesched.plugins.stores.scheduled import ScheduledKVStore
from bytesched.testing import KVStoreContract

TESTS = sorted(name for name in dir(KVStoreContract) if name.startswith("test_"))


def scheduled(store: KVStore, **fields: Any) -> ScheduledKVStore:
    return ScheduledKVStore(store, Config(**{"timeout_s": TIMEOUT_S, **fields}))


class Suite(KVStoreContract):
    """The suite as one worker runs it, over a store that was made for it."""

    def __init__(self, made: KVStore) -> None:
        self.made = made

    def store(self) -> KVStore:
        return self.made

    def array(self, numbers: list[float]) -> Any:
        is_torch = isinstance(self.made, ScheduledKVStore)
        return torch.tensor(numbers) if is_torch else np.array(numbers, dtype=np.float32)

    def numbers(self, array: Any) -> list[float]:
        return [float(number) for number in array]

    def wait(self, kv: KVStore, key: Key) -> None:
        if isinstance(kv, ScheduledKVStore):
            kv.wait(key)


@pytest.mark.parametrize(
    ("workers", "is_scheduled"), [(1, False), (3, False), (1, True), (2, True)]
)
@pytest.mark.parametrize("name", TESTS)
def test_stores_keep_the_contract(name: str, workers: int, is_scheduled: bool) -> None:
    stores: list[Any] = LocalKVStore.group(workers, timeout_s=TIMEOUT_S)
    if is_scheduled:
        stores = [scheduled(view, partition_bytes=16) for view in stores]
    together(lambda rank: getattr(Suite(stores[rank]), name)(), workers)


def test_a_worker_that_leaves_is_named() -> None:
    first, second = LocalKVStore.group(2, timeout_s=TIMEOUT_S)
    together(lambda rank: (first, second)[rank].init("a", np.zeros(2)))
    first.push("a", np.ones(2))
    second.close()
    with pytest.raises(PeerLost, match="worker 1 left"):
        first.pull("a", np.ones(2))


def test_a_worker_that_never_comes_is_waited_for_no_longer_than_said() -> None:
    first, _ = LocalKVStore.group(2, timeout_s=0.01)
    with pytest.raises(SchedulerTimeout, match="all workers at: init 'a'"):
        first.init("a", np.zeros(2))


# -- the scheduled store ---------------------------------------------------------------


@pytest.mark.parametrize("made_with", [np.zeros(3, np.float32), torch.zeros(3)], ids=type)
def test_tensors_and_arrays_mix(made_with: Any) -> None:
    kv = scheduled(LocalKVStore(timeout_s=TIMEOUT_S))
    kv.init("a", made_with)
    for value in (np.ones(3, np.float32), torch.ones(3)):
        for out in (np.zeros(3, np.float32), torch.zeros(3)):
            kv.pushpull("a", value, out)
            kv.wait("a")
            assert out.tolist() == [1.0, 1.0, 1.0]
            out[...] = 0
            kv.pull("a", out)
            assert out.tolist() == [1.0, 1.0, 1.0]
    kv.close()


class HandStore(LocalKVStore):
    """Transfers end when the test says so."""

    answers_by_priority = False
    num_servers = 1

    def __init__(self) -> None:
        super().__init__(timeout_s=TIMEOUT_S)
        self.under_way: list[tuple[str, Key, Any, Ended]] = []
        self.begun: list[tuple[str, Key]] = []
        self.changed = threading.Condition()

    def start_push(self, key: Key, value: Any, ended: Ended, priority: int = 0) -> None:
        self._begin("push", key, value, ended)

    def start_pull(self, key: Key, out: Any, ended: Ended, priority: int = 0) -> None:
        self._begin("pull", key, out, ended)

    def _begin(self, what: str, key: Key, array: Any, ended: Ended) -> None:
        with self.changed:
            self.under_way.append((what, key, array, ended))
            self.begun.append((what, key))
            self.changed.notify_all()

    def wait_for(self, begun: int) -> list[tuple[str, Key]]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.begun) >= begun, TIMEOUT_S), self.begun
            return list(self.begun)

    def end(self, what: str, key: Key, error: BaseException | None = None) -> None:
        def found() -> list[tuple[str, Key, Any, Ended]]:
            return [entry for entry in self.under_way if entry[:2] == (what, key)]

        with self.changed:
            assert self.changed.wait_for(found, TIMEOUT_S), (what, key, self.begun)
            entry = found()[0]
            self.under_way.remove(entry)
        if error is None:
            getattr(self, what)(key, entry[2])
        entry[3](error)


def begun(**fields: Any) -> tuple[HandStore, ScheduledKVStore]:
    """One key is on its way."""
    store = HandStore()
    kv = scheduled(store, **fields)
    kv.init("a", torch.zeros(4))
    kv.pushpull("a", torch.zeros(4))
    store.wait_for(1)
    return store, kv


def test_a_pull_runs_beside_the_next_push() -> None:
    store = HandStore()
    kv = scheduled(store, partition_bytes=16, credit_bytes=16)
    value = torch.arange(8.0)
    kv.init("a", value)
    kv.pushpull("a", value.clone(), out := torch.zeros(8))
    first, second = "a/0.0", "a/0.1"
    assert store.wait_for(1) == [("push", first)]
    store.end("push", first)
    assert set(store.wait_for(3)[1:]) == {("push", second), ("pull", first)}
    store.end("pull", first)
    store.end("push", second)
    store.wait_for(4)
    assert not out.any()
    store.end("pull", second)
    kv.wait("a")
    assert torch.equal(out, value)
    kv.close()


def test_a_store_that_answers_by_priority_is_asked_for_everything_at_once() -> None:
    store = HandStore()
    store.answers_by_priority = True
    kv = scheduled(store, partition_bytes=16, credit_bytes=16)
    for key in ("front", "back"):
        kv.init(key, torch.zeros(4))
    for key in ("back", "front"):
        kv.pushpull(key, torch.zeros(4))
        store.end("push", key)
    # The pull of "back" may wait for another worker: that of "front" does not wait behind it.
    assert set(store.wait_for(4)) >= {("pull", "back"), ("pull", "front")}
    store.end("pull", "front")
    kv.wait("front")
    store.end("pull", "back")
    kv.wait("back")
    kv.close()


@pytest.mark.parametrize("servers", [1, 3])
def test_more_chunks_are_on_their_way_to_several_servers(servers: int) -> None:
    store = HandStore()
    store.num_servers = servers
    kv = scheduled(store, partition_bytes=16)
    window = chunks_on_their_way(servers)
    keys = [f"key {number}" for number in range(window + 2)]
    for key in keys:
        kv.init(key, torch.zeros(4))
    urgent, less, *first = keys
    for key in (*first, less, urgent):
        kv.push(key, torch.zeros(4))
    for key in first[:2]:
        store.end("push", key)
    # The window was full with the first: what came after them waited, and was chosen from.
    assert store.wait_for(len(keys)) == [("push", key) for key in (*first, urgent, less)]
    assert kv.stats()["credit_bytes"] == window * 16
    kv.close()


def test_a_window_does_not_grow_with_every_server() -> None:
    windows = [chunks_on_their_way(servers) for servers in (0, 1, 2, 3, 64)]
    assert windows == sorted(windows)
    assert windows[0] == windows[1] < windows[2] == windows[-1]


@pytest.mark.parametrize(
    ("inits", "pushes", "order"),
    [
        # In the order of init; the first one is under way before there is a choice.
        ("front middle back", "back middle front", "back front middle"),
        ("a:-1 b:5 c:1", "a c b", "a b c"),
        ("first front back", "first front:-9 back", "first back front"),
    ],
    ids=["by_init", "given_at_init", "given_at_push"],
)
def test_urgent_keys_overtake(inits: str, pushes: str, order: str) -> None:
    store = HandStore()
    kv = scheduled(store, partition_bytes=16, credit_bytes=16)
    for call, keys in ((kv.init, inits), (kv.push, pushes)):
        for key, _, priority in (each.partition(":") for each in keys.split()):
            call(key, torch.zeros(4), int(priority) if priority else None)
    for key in order.split():
        store.end("push", key)
    assert store.wait_for(3) == [("push", key) for key in order.split()]
    kv.close()


def steps(kv: ScheduledKVStore, keys: list[str], sizes: list[int], count: int) -> list[list[float]]:
    """Trains nothing: pushes and pulls all keys, and returns what came back."""
    outs = [torch.zeros(size) for size in sizes]
    seen = []
    for step in range(count):
        for key, size in reversed(list(zip(keys, sizes, strict=True))):
            kv.push(key, torch.arange(float(size)) * (step + 1) + kv.rank)
        for key, out in zip(keys, outs, strict=True):
            kv.pull(key, out)
        kv.wait()
        seen.append(torch.cat(outs).tolist())
    return seen


def expected(sizes: list[int], count: int, workers: int) -> list[list[float]]:
    numbers = torch.cat([torch.arange(float(size)) for size in sizes])
    extra = sum(range(workers))
    return [(numbers * (step + 1) * workers + extra).tolist() for step in range(count)]


def test_large_keys_are_cut_and_small_ones_sent_as_they_are() -> None:
    keys, sizes = [f"k{n}" for n in range(9)], [3, 1, 40, 2, 2, 2, 2, 100, 1]
    views = LocalKVStore.group(2, timeout_s=TIMEOUT_S)

    def work(rank: int) -> tuple[list[list[float]], object]:
        kv = scheduled(views[rank], partition_bytes=64)
        for key, size in zip(keys, sizes, strict=True):
            kv.init(key, torch.zeros(size))
        seen = steps(kv, keys, sizes, 4)
        chunks = kv.stats()["chunks"]
        kv.close()
        return seen, chunks

    assert together(work) == [(expected(sizes, 4, 2), 7 + 3 + 6)] * 2


def test_an_unwrapped_store_has_every_key_under_its_own_name() -> None:
    keys, sizes = ["a", "b", "c"], [50, 5, 33]
    views = LocalKVStore.group(2, timeout_s=TIMEOUT_S)

    def work(rank: int) -> list[float]:
        kv = scheduled(views[rank], partition_bytes=32)
        for key, size in zip(keys, sizes, strict=True):
            kv.init(key, torch.zeros(size))
        steps(kv, keys, sizes, 2)
        store = kv.unwrap()
        outs = [torch.zeros(size) for size in sizes]
        for key, out in zip(keys, outs, strict=True):
            store.pull(key, out)
        return torch.cat(outs).tolist()

    assert together(work) == [expected(sizes, 2, 2)[1]] * 2


def test_a_key_waits_for_no_other_one() -> None:
    kv = scheduled(LocalKVStore(timeout_s=TIMEOUT_S))
    keys, out = ["a", "b"], torch.zeros(2)
    for key in keys:
        kv.init(key, out)
    steps(kv, keys, [2, 2], 2)
    kv.pushpull("a", torch.ones(2), out)
    kv.wait("a")
    assert out.tolist() == [1.0, 1.0]
    kv.push("b", torch.ones(2))
    kv.pushpull("a", 2 * torch.ones(2), out)
    kv.wait()
    assert out.tolist() == [2.0, 2.0]
    kv.close()


def test_an_optimizer_in_the_store_updates_every_chunk() -> None:
    def updater(key: Key, total: Any, value: Any) -> None:
        value -= total

    kv = scheduled(LocalKVStore(updater=updater), partition_bytes=16)
    kv.init("a", torch.zeros(8))
    for step in range(3):
        kv.pushpull("a", torch.ones(8), out := torch.zeros(8))
        kv.wait("a")
        assert out.tolist() == [-1.0 - step] * 8
    assert kv.stats()["chunks"] == 2
    kv.close()


def test_an_error_of_the_store_is_raised_where_the_user_waits() -> None:
    store, kv = begun()
    store.end("push", "a", PeerLost("server 2 is gone"))
    with pytest.raises(PeerLost, match="server 2"):
        kv.wait("a")
    with pytest.raises(PeerLost, match="server 2"):
        kv.push("a", torch.zeros(4))
    kv.close()


def test_a_wait_ends_with_the_limit_and_tells_the_story() -> None:
    _, kv = begun(timeout_s=0.05)
    with pytest.raises(SchedulerTimeout, match="pull of key 'a'"):
        kv.wait("a")
    kv.close()


def test_nobody_waits_for_a_closed_store() -> None:
    _, kv = begun()
    kv.close()
    for call in (kv.wait, kv.barrier):
        with pytest.raises(SchedulerClosed, match="on a closed store"):
            call()


def test_values_of_any_shape_and_of_parameters() -> None:
    kv = scheduled(LocalKVStore(), partition_bytes=16)
    weight = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4))
    scalar, empty = torch.tensor(2.5), torch.zeros(0, 3)
    transposed = torch.arange(6.0).reshape(2, 3).t()
    values = {"weight": weight, "scalar": scalar, "empty": empty, "transposed": transposed}
    for key, value in values.items():
        kv.init(key, value)
    for _ in range(2):
        before = {key: value.detach().clone() for key, value in values.items()}
        for key, value in values.items():
            kv.pushpull(key, value)
        kv.wait()
        for key, value in values.items():
            assert torch.equal(value.detach(), before[key]), key
    kv.close()


def test_other_kinds_of_values_are_refused_by_name() -> None:
    kv = scheduled(LocalKVStore())
    with pytest.raises(PluginError, match="memoryview"):
        kv.init("a", memoryview(b"1234"))
    kv.init("a", np.zeros(3, np.float32))
    with pytest.raises(MismatchError, match=r"float64 \(3,\).*float32 \(3,\)"):
        kv.push("a", np.zeros(3))
    kv.close()


def test_observers_see_both_pipes() -> None:
    class Seen(Observer):
        def __init__(self) -> None:
            self.spans: set[tuple[str, str]] = set()
            self.steps = 0

        def on_span(
            self, track: str, name: str, start_ns: int, end_ns: int, args: Any = None
        ) -> None:
            assert end_ns >= start_ns
            self.spans.add((track, name))

        def on_step(self, step: int, at_ns: int) -> None:
            self.steps = step

    seen = Seen()
    kv = ScheduledKVStore(LocalKVStore(), Config(), Observers([seen]))
    kv.init("a", torch.zeros(4))
    for _ in range(2):
        kv.pushpull("a", torch.zeros(4))
        kv.wait("a")
    kv.close()
    assert {("send", "a"), ("send", "pull a"), ("queue", "a"), ("queue", "pull a")} <= seen.spans
    assert seen.steps == 2


def dropped(store: LocalKVStore) -> torch.Tensor:
    """What the last pull of a wrapped store fills that nothing refers to any more."""
    kv, out = scheduled(store), torch.zeros(64)
    for key in ("a", "b"):
        kv.init(key, torch.zeros(64))
        kv.push(key, torch.full((64,), 3.0))
        kv.pull(key, out)
    return out


def test_a_wrapped_store_that_is_dropped_ends_what_it_began_and_its_threads() -> None:
    before = threading.active_count()
    for _ in range(4):
        store = LocalKVStore()
        out = dropped(store)
        gc.collect()
        wait_for_ends()
        assert torch.equal(out, torch.full((64,), 3.0))
        assert threading.active_count() <= before


def test_a_wrapped_store_that_is_dropped_with_another_worker_missing_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, _ = LocalKVStore.group(2, timeout_s=0.2)
    before = threading.active_count()
    kv = ScheduledKVStore(Pushed(store), Config(timeout_s=0.2))
    kv.init("a", torch.zeros(4))
    kv.push("a", torch.ones(4))
    kv.pull("a", torch.zeros(4))
    del kv
    gc.collect()
    wait_for_ends()
    assert threading.active_count() <= before
    assert "a wrapped store that was dropped" in caplog.text


class Pushed:
    """A view whose ``init`` does not wait for the other workers."""

    def __init__(self, view: LocalKVStore) -> None:
        self._view = view

    def init(self, key: Key, value: Any) -> None:
        self._view._shared.entries[key] = _Entry(describe(value), value.clone())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)
