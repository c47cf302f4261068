"""What emulated experts exchange, in one piece and in several, and the figures of it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bytesched.bench.profile import LayerProfile
from bytesched.plugins.bench.workloads.emulated import EmulatedLayer, Pace
from bytesched.plugins.bench.workloads.experts import Exchanges, by_collectives, by_peers
from bytesched.plugins.exchanges.peers import Transfer

LAYER = LayerProfile("experts", 1.0, 2.0, (), 0, 4096)


class Paces(Pace):
    """Computes in no time, and counts for how long."""

    def __init__(self) -> None:
        super().__init__()
        self.computed_s: list[float] = []

    def start(self) -> None:
        """Nothing."""

    def finish(self, duration_s: float) -> None:
        """Counts it."""
        self.computed_s.append(duration_s)


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """An all-to-all whose other rank has twice as much."""

    def all_to_all_single(received: Tensor, sent: Tensor, group: object = None) -> None:
        received[0] = sent[0]
        received[1] = 2 * sent[0]

    monkeypatch.setattr(dist, "all_to_all_single", all_to_all_single)


class TwoPeers:
    """Peers of which the other one has twice as much."""

    size = 2

    def start(self, x: Tensor, *_: object, is_urgent: bool) -> Transfer:
        assert is_urgent
        return Transfer(torch.stack([x[0], 2 * x[0]]), lambda: None)


def passed(exchanges: Exchanges) -> tuple[Tensor, Tensor, list[float]]:
    pace = Paces()
    experts = EmulatedLayer(LAYER, pace)
    experts.exchanges = exchanges
    x = torch.arange(16.0, requires_grad=True)
    y = experts(x)
    y.square().sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad, pace.computed_s


@pytest.mark.usefixtures("two_ranks")
def test_pieces_give_the_same_bits_and_compute_as_long() -> None:
    whole = Exchanges(by_collectives(None, is_urgent=True), 2)
    cut = Exchanges(by_peers(TwoPeers()), 2, pieces=4)  # type: ignore[arg-type]
    one, other = passed(whole), passed(cut)
    assert one[0].equal(other[0])
    assert one[1].equal(other[1])
    assert not one[0].equal(torch.arange(16.0))
    assert one[2] == [1e-3, 2e-3]
    assert other[2] == pytest.approx([0.25e-3] * 4 + [0.5e-3] * 4)
    assert (len(whole.taken_ms), len(cut.taken_ms)) == (4, 16)
    assert len(whole.waited_ms) == len(cut.waited_ms) == 2
    whole.clear()
    assert not whole.taken_ms
    assert not whole.waited_ms


def test_without_exchanges_experts_compute_alone() -> None:
    pace = Paces()
    x = torch.ones(16, requires_grad=True)
    y = EmulatedLayer(LAYER, pace)(x)
    y.sum().backward()
    assert y.detach().equal(torch.ones(16))
    assert pace.computed_s == [1e-3, 2e-3]
