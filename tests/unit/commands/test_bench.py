"""The bench: what it refuses, its profiles, its emulated compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import TINY
from torch import nn

import bytesched.bench.systems
from bytesched.bench.profile import (
    Profile,
    load_profile,
    parse_profile,
    save_profiles,
    shipped_profiles,
)
from bytesched.bench.systems import System, check_systems, ddp_arguments, parse_systems
from bytesched.errors import ConfigError
from bytesched.plugins.bench.workloads import emulated as emulate
from bytesched.plugins.bench.workloads.compute import measure_compute, record_profile
from bytesched.plugins.bench.workloads.models import REAL, Workload, emulated, named


def changed_layer(**fields: object) -> dict[str, Any]:
    return {"layers": [{"forward_ms": 1, "backward_ms": 1, "shapes": [[2]]} | fields]}


def test_systems_and_their_options() -> None:
    first, second = parse_systems("ddp:bucket_mb=4+bucket_view=1, bytesched:policy=fifo+split=off")
    assert first == System(
        "ddp:bucket_mb=4+bucket_view=1", "ddp", {"bucket_mb": "4", "bucket_view": "1"}
    )
    assert second.options == {"policy": "fifo", "split": "off"}
    assert ddp_arguments(first.options) == {"bucket_cap_mb": 4.0, "gradient_as_bucket_view": True}
    assert ddp_arguments({"static_graph": "true"}) == {"static_graph": True}
    assert ddp_arguments({}) == {}


@pytest.mark.parametrize(
    ("installed", "is_new_enough"),
    [("2.14.1+cpu", False), ("2.15.0", True), ("2.16.0a0", True), ("3.0.0", True)],
)
def test_late_finalization_needs_a_torch_that_has_it(
    installed: str, is_new_enough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bytesched.bench.systems, "version", lambda _: installed)
    systems = parse_systems("ddp,ddp-finalize:bucket_mb=4")
    if is_new_enough:
        check_systems(systems, launcher="none")
    else:
        with pytest.raises(ConfigError, match=r"needs torch 2\.15 or newer, and 2\.14\.1\+cpu is"):
            check_systems(systems, launcher="none")


@pytest.mark.parametrize("name", shipped_profiles())
def test_shipped_profiles(name: str) -> None:
    profile = load_profile(name)
    assert 10e6 < profile.nbytes < 60e6
    assert 0.1 < profile.compute_s < 1
    assert profile.scaled(2).compute_s == pytest.approx(2 * profile.compute_s)
    assert set(shipped_profiles()) == {"gpt", "moe", "vgg", "resnet"}


@pytest.mark.parametrize("recorded", [{}, {"batch": 8}])
def test_a_profile_survives_being_saved(recorded: dict[str, int], tmp_path: Path) -> None:
    profile = parse_profile(TINY | recorded, "tiny")
    path = str(tmp_path / "saved.json")
    save_profiles([profile], path)
    assert load_profile(path) == profile


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "a list of layers"),
        ({"layers": []}, "nothing would be sent"),
        ({"layers": [3]}, r"layers\[0\] is 3"),
        (changed_layer(forward_ms="1"), r"layers\[0\].forward_ms is '1', not float"),
        (changed_layer(backward_ms=-1), "a time of 0 ms or more"),
        (changed_layer(shapes=[[0]]), "lists of positive sizes"),
        (changed_layer(shapes=["ab"]), "shapes.* is 'ab', not"),
        (changed_layer(output_bytes=0.5), "output_bytes is 0.5, not int"),
        (changed_layer(output_bytes=-1), "output_bytes and exchange_bytes: expected 0 or more"),
        (changed_layer(output=1), "has no 'output'"),
        (changed_layer(forward_ms=0, backward_ms=0), "the times of all layers"),
    ],
)
def test_a_wrong_profile_is_refused(content: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_profile(content, "test.json")


class Clock:
    """Time that passes only when slept or told, at whose pace layers compute."""

    def __init__(self) -> None:
        self.now_s, self.cpu_s, self.oversleep_s = 100.0, 5.0, 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def thread_time(self) -> float:
        return self.cpu_s

    def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s + self.oversleep_s

    def work(self, duration_s: float) -> None:
        self.now_s += duration_s
        self.cpu_s += duration_s

    def layer(self, pace: emulate.Pace, duration_s: float, work_s: float = 0.0) -> float:
        """How long one takes."""
        began_s = self.now_s
        pace.start()
        self.work(work_s)
        pace.finish(duration_s)
        return self.now_s - began_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(emulate, "time", made)
    return made


def test_pace_keeps_the_sum_although_sleep_is_late(clock: Clock) -> None:
    clock.oversleep_s = 0.0004
    pace = emulate.Pace()
    took_s = sum(clock.layer(pace, 0.002, work_s=0.0002) for _ in range(50))
    assert took_s == pytest.approx(50 * 0.002 + clock.oversleep_s)


def test_pace_counts_the_host_between_layers(clock: Clock) -> None:
    pace = emulate.Pace()
    assert clock.layer(pace, 0.01) == pytest.approx(0.01)
    clock.work(0.003)
    assert clock.layer(pace, 0.01) == pytest.approx(0.01)
    # A wait hides what the host is behind, here too.
    clock.work(0.003)
    clock.now_s += 0.5
    assert clock.layer(pace, 0.01) == pytest.approx(0.01)


def test_pace_forgets_lateness_that_a_wait_has_hidden(clock: Clock) -> None:
    pace, clock.oversleep_s = emulate.Pace(), 0.001
    clock.layer(pace, 0.01)
    clock.now_s += 0.5
    clock.oversleep_s = 0.0
    assert clock.layer(pace, 0.01) == pytest.approx(0.01)


def gradients_of(
    profile: Profile, seed: int, changed: tuple[int, int] | None = None
) -> list[torch.Tensor]:
    workload = emulated(profile, seed=3)
    parameters = list(workload.model.parameters())
    if changed is not None:
        with torch.no_grad():
            parameters[0][changed] += 0.05
    workload.loss(workload.model, seed).backward()
    assert [p.grad.shape for p in parameters if p.grad is not None] == [(64, 64), (64,), (64, 256)]
    return [p.grad for p in parameters if p.grad is not None]


def test_emulated_gradients_depend_on_weights_and_input_and_nothing_else() -> None:
    profile = parse_profile(TINY, "tiny").scaled(1e-3)
    reference = gradients_of(profile, seed=1)
    assert all(map(torch.equal, reference, gradients_of(profile, seed=1)))
    for other in (gradients_of(profile, seed=2), gradients_of(profile, seed=1, changed=(0, 0))):
        assert not any(map(torch.equal, reference, other))
    assert not torch.equal(reference[0], gradients_of(profile, seed=1, changed=(63, 63))[0])


@pytest.mark.parametrize("name", REAL)
def test_real_models_learn(name: str) -> None:
    torch.set_num_threads(1)
    workload = named(name, 2, seed=1)
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = workload.loss(workload.model, 0)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert 10e6 < 4 * sum(p.numel() for p in workload.model.parameters()) < 60e6


def test_a_model_of_ones_own_must_be_a_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_model.py").write_text("def make():\n    return 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="returned int; expected a pair"):
        named("own_model:make", 0, 1)
    with pytest.raises(ConfigError, match="has no attribute 'made'"):
        named("own_model:made", 0, 1)


class Unused(nn.Module):
    """Holds a layer whose forward is never called, as attention holds its output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.inner.weight, self.inner.bias)


def test_compute_times_of_a_chain_and_its_profile() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), Unused())
    workload = Workload(model, lambda module, seed: module(torch.full((2, 4), float(seed))).sum())
    times = measure_compute(workload, 3, float)  # type: ignore[arg-type]
    work = times.work()
    assert [gradient.nbytes for gradient in work] == [128, 32, 128, 16, 64, 16]
    assert all(0 <= gradient.release_s <= times.backward_s for gradient in work)
    assert work[0].tail_s > work[2].tail_s > work[4].tail_s
    assert work[0].release_s > work[2].release_s > work[4].release_s
    profile = record_profile("chain", workload, times)
    assert [layer.name for layer in profile.layers] == ["0", "2", "3.inner"]
    assert [layer.shapes for layer in profile.layers][1] == ((4, 8), (4,))
    assert profile.compute_s == pytest.approx(times.compute_s, rel=1e-6)
    # Of one sample of two, in float32: what the next layer reads.
    assert profile.batch == 2
    assert [layer.output_bytes for layer in profile.layers] == [32, 16, 0]
