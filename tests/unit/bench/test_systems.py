"""Key-value stores and Horovod in the bench: what is refused, the order of P3."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from bytesched.commands import bench as bench
from bytesched.errors import ConfigError, SchedulerTimeout
from bytesched.lab import ranks as lab_ranks
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


def spec_of(timeout_s: float) -> Any:
    return SimpleNamespace(servers=1, timeout_s=timeout_s)


def a_chain() -> tuple[nn.Sequential, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 3), nn.Linear(3, 3))
    return model, torch.randn(2, 4)


def test_p3_sends_one_slice_at_a_time_first_layer_first_and_updates_as_adamw_does(
    held_store: Any,
) -> None:
    model, inputs = a_chain()
    reference, _ = a_chain()
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    options = {"slice": "10"}
    running = set_up_store("kv-p3", options, model, spec_of(100.0), held_store)
    for _ in range(2):
        running.optimizer.zero_grad()
        model(inputs).square().sum().backward()
        first = len(held_store.pushes)
        running.optimizer.step()
        order = []
        while held_store.pushes:
            assert len(held_store.pushes) == 1, "one on the way"
            key, ended = held_store.pushes.pop()
            order.append(key)
            ended(None)
            held_store.pulls.pop()[1](None)
        assert first == 1
        # What was first on the link is the last layer's; after it, the first layer's go first.
        assert order[0].startswith("2.")
        assert order[1:4] == ["0.weight/0", "0.weight/1", "0.weight/2"], order
        plain.zero_grad()
        reference(inputs).square().sum().backward()
        plain.step()
    running.close()
    assert all(map(torch.equal, model.parameters(), reference.parameters()))


def test_p3_tells_whoever_waits_what_went_wrong(held_store: Any) -> None:
    model, inputs = a_chain()
    running = set_up_store("kv-p3", {}, model, spec_of(100.0), held_store)
    model(inputs).sum().backward()
    running.optimizer.step()
    held_store.pushes.pop()[1](RuntimeError("no server"))
    with pytest.raises(RuntimeError, match="no server"):
        model(inputs)


def test_the_plain_system_pushes_in_backward_and_waits_in_step(held_store: Any) -> None:
    model, inputs = a_chain()
    running = set_up_store("kv-plain", {}, model, spec_of(0.1), held_store)
    model(inputs).sum().backward()
    pushed = [key for key, _ in held_store.pushes]
    assert pushed[-1] == "0.weight/0"
    assert len(pushed) == 5
    for _, ended in held_store.pushes:
        ended(None)
    assert [key for key, _ in held_store.pulls] == pushed
    for _, ended in held_store.pulls[:-1]:
        ended(None)
    waiting: Callable[[], object] = running.optimizer.step
    with pytest.raises(SchedulerTimeout, match=r"waited 0\.1 s"):
        waiting()


needs_horovod = pytest.mark.needs("horovod")


@needs_horovod
def test_mpi_needs_its_mpirun(monkeypatch: pytest.MonkeyPatch, said: Callable[..., str]) -> None:
    monkeypatch.setattr("bytesched.lab.ranks.shutil.which", lambda *_, **__: None)
    assert "needs mpirun" in said("bench --systems horovod --controller mpi", code=2)


def test_without_horovod_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, said: Callable[..., str]
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        "bytesched.bench.systems.importlib.util.find_spec",
        lambda name: None if name == "horovod" else real(name),
    )
    assert "pip install 'bytesched[horovod]'" in said("bench --systems horovod", code=2)


def test_another_mpi_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "mpirun"
    other.write_text("#!/bin/sh\necho Intel MPI\n")
    other.chmod(0o755)
    monkeypatch.setattr("bytesched.lab.ranks.shutil.which", lambda *_, **__: str(other))
    with pytest.raises(ConfigError, match="is not Open MPI"):
        lab_ranks.find_mpirun()


@needs_horovod
def test_settings_become_variables_and_the_rest_are_bytescheds() -> None:
    from bytesched.plugins.bench.systems.horovod import split_options

    variables, left = split_options({"fusion_mb": "0.5", "cycle_ms": "2", "policy": "fifo"})
    assert left == {"policy": "fifo"}
    assert variables == {"HOROVOD_FUSION_THRESHOLD": "524288", "HOROVOD_CYCLE_TIME": "2"}
    assert split_options({}) == ({}, {})
    assert split_options({"cache": "0"}) == ({"HOROVOD_CACHE_CAPACITY": "0"}, {})
