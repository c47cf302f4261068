"""Key-value stores in the bench: what is refused, figures, P3's order."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_results import bench_result
from torch import nn

from bytesched.bench.table import add_figures, opponents, table
from bytesched.commands import bench as bench
from bytesched.errors import SchedulerTimeout
from bytesched.kvstore import Ended
from bytesched.link.bound import store_bytes_per_s
from bytesched.plugins.bench.systems.servers import set_up_store


@pytest.mark.parametrize(
    ("workers", "servers", "expected"),
    [
        (2, 1, 50.0),  # the server's link carries what both workers push
        (2, 2, 100.0),
        (2, 3, 100.0),
        (4, 1, 25.0),
        (2, 0, 100.0),  # half of each value stays, but the other half is sent on
        (4, 0, 400 / 6),
    ],
)
def test_the_narrowest_link(workers: int, servers: int, expected: float) -> None:
    assert store_bytes_per_s(100.0, workers=workers, servers=servers) == pytest.approx(expected)


def test_figures_of_servers() -> None:
    times_ms = {"kv-plain": [300.0], "kv-p3": [200.0], "bytesched-kv:updates=1": [160.0]}
    result = bench_result(times_ms, servers=1, nominal_bytes_per_s=100e6)
    add_figures(result)
    assert opponents("bytesched-kv:updates=1", result["systems"]) == ("kv-plain", "kv-p3")
    ours = result["systems"]["bytesched-kv:updates=1"]["figures"]
    assert ours["speedup_over_plain"] == pytest.approx(300 / 160)
    assert ours["speedup_over_best"] == pytest.approx(200 / 160)
    assert ours["share_of_possible_gain"] == pytest.approx(40 / 80)
    assert ours["duplex_share"] == pytest.approx(100 / 160)
    text = table(result)
    assert "duplex" in text
    assert "bus MB/s" not in text


def spec_of(timeout_s: float) -> Any:
    return SimpleNamespace(servers=1, timeout_s=timeout_s)


class _Held:
    """One worker's store that keeps every push until it is let go."""

    rank, num_workers = 0, 1

    def __init__(self) -> None:
        self.pushes: list[tuple[str, Ended]] = []
        self.pulls: list[tuple[str, Ended]] = []

    def init(self, key: str, value: Any) -> None:
        pass

    def start_push(self, key: str, value: Any, ended: Ended, priority: int = 0) -> None:
        self.pushes.append((key, ended))

    def start_pull(self, key: str, out: Any, ended: Ended, priority: int = 0) -> None:
        self.pulls.append((key, ended))


def a_chain() -> tuple[nn.Sequential, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 3), nn.Linear(3, 3))
    return model, torch.randn(2, 4)


def test_p3_sends_one_slice_at_a_time_first_layer_first_and_updates_as_adamw_does() -> None:
    model, inputs = a_chain()
    reference, _ = a_chain()
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-3, fused=True)
    store = _Held()
    options = {"slice": "10"}
    running = set_up_store("kv-p3", options, model, spec_of(100.0), store)
    for _ in range(2):
        running.optimizer.zero_grad()
        model(inputs).square().sum().backward()
        first = len(store.pushes)
        running.optimizer.step()
        order = []
        while store.pushes:
            assert len(store.pushes) == 1, "one on the way"
            key, ended = store.pushes.pop()
            order.append(key)
            ended(None)
            store.pulls.pop()[1](None)
        assert first == 1
        # What was first on the link is the last layer's; after it, the first layer's go first.
        assert order[0].startswith("2.")
        assert order[1:4] == ["0.weight/0", "0.weight/1", "0.weight/2"], order
        plain.zero_grad()
        reference(inputs).square().sum().backward()
        plain.step()
    running.close()
    assert all(map(torch.equal, model.parameters(), reference.parameters()))


def test_p3_tells_whoever_waits_what_went_wrong() -> None:
    model, inputs = a_chain()
    store = _Held()
    running = set_up_store("kv-p3", {}, model, spec_of(100.0), store)
    model(inputs).sum().backward()
    running.optimizer.step()
    store.pushes.pop()[1](RuntimeError("no server"))
    with pytest.raises(RuntimeError, match="no server"):
        model(inputs)


def test_the_plain_system_pushes_in_backward_and_waits_for_all_in_step() -> None:
    model, inputs = a_chain()
    store = _Held()
    running = set_up_store("kv-plain", {}, model, spec_of(0.1), store)
    model(inputs).sum().backward()
    pushed = [key for key, _ in store.pushes]
    assert pushed[-1] == "0.weight/0"
    assert len(pushed) == 5
    for _, ended in store.pushes:
        ended(None)
    assert [key for key, _ in store.pulls] == pushed
    for _, ended in store.pulls[:-1]:
        ended(None)
    waiting: Callable[[], object] = running.optimizer.step
    with pytest.raises(SchedulerTimeout, match=r"waited 0\.1 s"):
        waiting()
