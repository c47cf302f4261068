"""Sizes of chunks for a training through a store, from the rate at which its workers push."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from together import TIMEOUT_S, together

from bytesched.config import Config
from bytesched.kvstore import Key, LocalKVStore
from bytesched.kvstore.pipes import chunks_on_their_way
from bytesched.plugins.stores.training import begin as kvstore_training
from bytesched.plugins.stores.training.begin import push_bytes_per_s
from bytesched.plugins.stores.training.wire import StoreWire

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


@pytest.mark.parametrize("servers", [1, 2])
def test_workers_measure_one_rate_and_delete_the_probes(servers: int) -> None:
    kept: list[set[Key]] = [set(), set()]

    class Watched:
        """A worker's view of a store, and the keys that it has made and not deleted."""

        def __init__(self, view: LocalKVStore) -> None:
            self.view = view

        def init(self, key: Key, value: Any) -> None:
            kept[self.view.rank].add(key)
            self.view.init(key, value)

        def delete(self, key: Key) -> None:
            kept[self.view.rank].remove(key)
            self.view.delete(key)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.view, name)

    views = LocalKVStore.group(2, timeout_s=TIMEOUT_S)

    def measure(rank: int) -> float:
        wire = StoreWire(Watched(views[rank]), name="s", config=Config(timeout_s=TIMEOUT_S))
        found = push_bytes_per_s(wire, servers)
        wire.close()
        return found

    first, second = together(measure)
    assert first == second > 0
    assert not any("probe" in str(key) for keys in kept for key in keys)


def test_a_store_that_keeps_its_keys_can_be_measured_twice() -> None:
    class Keeping:
        """A worker's view of a store that cannot delete."""

        def __init__(self, view: LocalKVStore) -> None:
            self._view = view

        def __getattr__(self, name: str) -> Any:
            if name == "delete":
                raise AttributeError(name)
            return getattr(self._view, name)

    views = LocalKVStore.group(2, timeout_s=TIMEOUT_S)

    def measure(rank: int) -> list[float]:
        wire = StoreWire(Keeping(views[rank]), name="s", config=Config(timeout_s=TIMEOUT_S))
        found = [push_bytes_per_s(wire, 1) for _ in range(2)]
        wire.close()
        return found

    first, second = together(measure)
    assert first == second
