"""Temperatures, pieces and gates, of one process."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bytesched.errors import ConfigError, PluginError
from bytesched.plugins import moe


@pytest.mark.parametrize("is_linear", [False, True])
def test_the_temperature_falls_from_first_to_last_and_stays(is_linear: bool) -> None:
    falls = moe.Temperature(10, is_linear=is_linear)
    taus = [falls.at(step) for step in range(30)]
    assert taus[0] == 1.0
    assert taus[5] == pytest.approx(0.75 if is_linear else math.sqrt(0.5))
    assert all(a > b for a, b in pairwise(taus[:11]))
    assert taus[10:] == pytest.approx([0.5] * 20)
    assert min(taus) >= 0.5


@pytest.mark.parametrize("wrong", [(0, 1.0, 0.5), (5, 0.4, 0.5), (5, 1.0, 0.0)])
def test_a_temperature_that_cannot_fall_is_refused(wrong: tuple[int, float, float]) -> None:
    with pytest.raises(ConfigError, match="first >= last > 0"):
        moe.Temperature(*wrong)


@given(st.integers(1, 16), st.integers(1, 16), st.integers(0, 20))
def test_top_k_keeps_k_whose_weights_sum_to_one(experts: int, k: int, tokens: int) -> None:
    if k > experts:
        with pytest.raises(ConfigError, match="k must be from 1"):
            moe.TopKGate(4, experts, k)
        return
    weight, keep, auxiliary = moe.TopKGate(4, experts, k)(torch.randn(tokens, 4))
    assert (keep.sum(dim=1) == k).all()
    assert (weight[~keep] == 0).all()
    if k > 1:
        torch.testing.assert_close(weight.sum(dim=1), torch.ones(tokens))
    assert auxiliary.isfinite()
    assert tokens == 0 or auxiliary >= 0


def test_dts_is_dense_then_sparse_then_hard_and_top_1_in_evaluation() -> None:
    torch.manual_seed(0)
    gate = moe.DTSGate(4, 16, moe.Temperature(4, 1.0, 0.1), hard_after=8)
    nn.init.zeros_(gate.scores.weight)
    x = torch.randn(4000, 4)
    kept = []
    for _ in range(10):
        weight, keep, _ = gate(x)
        kept.append(keep.sum(dim=1).double().mean().item())
        assert (weight[~keep] == 0).all()
        assert keep.any(dim=1).all()
        gate.step()
    # 16 equal experts keep as many as the paper's code does.
    assert kept[0] == pytest.approx(15.7, abs=0.1)
    assert kept[4] == pytest.approx(1.9, abs=0.1)
    assert kept[8:] == [1.0, 1.0]
    again = moe.DTSGate(4, 16, moe.Temperature(4, 1.0, 0.1), hard_after=8)
    again.load_state_dict(gate.state_dict())
    assert again.is_hard
    assert again.tau == pytest.approx(0.1)
    fresh = moe.DTSGate(4, 16, moe.Temperature(4)).eval()
    weight, keep, _ = fresh(x)
    assert (keep.sum(dim=1) == 1).all()
    assert torch.equal(weight.sum(dim=1), fresh.scores(x).softmax(dim=1).amax(dim=1))


def test_the_auxiliary_loss_of_dts_is_the_published_one() -> None:
    torch.manual_seed(0)
    gate = moe.DTSGate(4, 5, moe.Temperature(4, 0.3, 0.3))
    weight, keep, auxiliary = gate(torch.randn(50, 4))
    expected = 25 * (weight.mean(dim=0) * keep.float().mean(dim=0)).mean()
    torch.testing.assert_close(auxiliary, expected)
    auxiliary.backward()
    assert gate.scores.weight.grad is not None
    assert gate.scores.weight.grad.abs().sum() > 0


def test_one_process_has_all_experts_and_weights_their_outputs() -> None:
    torch.manual_seed(0)
    experts = [nn.Linear(4, 4) for _ in range(3)]
    layer = moe.MoE(moe.TopKGate(4, 3, 2), experts)
    x = torch.randn(2, 5, 4)
    tokens = x.flatten(0, 1)
    weight = layer.gate(tokens).weight
    dense = sum(weight[:, e : e + 1] * experts[e](tokens) for e in range(3))
    torch.testing.assert_close(layer(x), dense.view_as(x))
    assert layer.kept == 2.0
    with pytest.raises(PluginError, match="the gate knows 4 experts, but this rank has 3"):
        moe.MoE(moe.TopKGate(4, 4), experts)


def test_an_exchange_of_one_process_is_what_it_was() -> None:
    x = torch.randn(3, 2)
    assert moe.exchange(x, [3], [3]) is x
    for counts in ([2], [1, 2]):
        with pytest.raises(PluginError, match="do not fit counts"):
            moe.exchange(x, counts, counts)
