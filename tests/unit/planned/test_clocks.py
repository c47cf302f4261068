"""What happens when: on the host, and on a device whose work is only queued."""

from __future__ import annotations

import pytest
import torch
from access_order import Order
from fake_cuda import CUDA, WORK_S, FakeCuda, FakeStream
from fake_wire import FakeWire, FakeWork

from bytesched.plugins.planned.clocks import PROBE, DeviceClock, HostClock

CPU = torch.device("cpu")


def test_where_it_does_not_it_waits_for_sums_with_names(monkeypatch: pytest.MonkeyPatch) -> None:
    wire, keys = FakeWire(), []
    wire.sees_ends = False
    start = wire.start

    def named(tensor: torch.Tensor, key: str = "") -> FakeWork:
        keys.append(key)
        return start(tensor, key)

    monkeypatch.setattr(wire, "start", named)
    probe = HostClock().probe(wire)
    assert HostClock().seconds_per_byte(probe) > 0.0
    assert all(work.is_over for work in wire.works)
    assert keys[0] == PROBE
    assert len(set(keys)) == len(keys) > 2


def test_a_moment_of_a_device_is_behind_what_is_queued(device: FakeCuda) -> None:
    clock = DeviceClock(CPU)
    with CUDA.on(FakeStream()):
        began = clock.moment()
        for _ in range(3):
            CUDA.current().queue()
        ended = clock.moment()
    assert clock.seconds(began, ended) == pytest.approx(3 * WORK_S)


def test_a_device_is_probed_by_sums_of_which_the_first_does_not_count(device: FakeCuda) -> None:
    wire = FakeWire(has_streams=True, order=Order())
    clock = DeviceClock(CPU)
    per_byte = clock.seconds_per_byte(clock.probe(wire))
    assert all(work.is_over for work in wire.works)
    sizes = {tensor.nbytes for tensor in wire.started}
    assert len(sizes) == 1
    # Longer than alone, as it is beside kernels.
    alone = WORK_S / sizes.pop()
    assert alone < per_byte < 2 * alone
