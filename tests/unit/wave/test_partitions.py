"""Model-parallel waves: layers measured, routes, and the memory of a part."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from bytesched.plugins.wave.cutting import layer_times_s
from bytesched.plugins.wave.stage import Cargo, Stage, sends, source, visits


def test_measuring_layers_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(0)
    times_s = layer_times_s(list(model), torch.randn(8, 4))
    after = torch.get_rng_state()
    torch.manual_seed(0)
    torch.randn(8, 4)
    assert torch.equal(after, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert len(times_s) == 3
    assert min(times_s) > 0


def test_layers_that_work_in_place_can_be_measured() -> None:
    inputs = torch.randn(8, 4)
    before = inputs.clone()
    layers = [nn.ReLU(inplace=True), nn.Linear(4, 4), nn.ReLU(inplace=True)]
    assert len(layer_times_s(layers, inputs)) == 3
    assert torch.equal(inputs, before)


@pytest.mark.parametrize("ranks", range(2, 9))
def test_every_stage_reaches_every_rank_and_every_gradient_its_home(ranks: int) -> None:
    routes = {(rank, route) for rank in range(ranks) for route in sends(rank, ranks)}
    for rank, (cargo, k) in itertools.product(range(ranks), visits(ranks)):
        origin = source(rank, cargo, k, ranks)
        arriving = {sender for sender, route in routes if route == (cargo, k, rank)}
        assert arriving == (set() if origin is None else {origin})
        if origin is None:
            assert rank == k or (cargo, k) == (Cargo.BACKWARD, ranks - 1)
    gradients = {(sender, *route[1:]) for sender, route in routes if route.cargo is Cargo.GRADIENT}
    assert gradients == {(r, k, r + 1) for r in range(ranks - 1) for k in range(ranks)}
    home = {(sender, *route[1:]) for sender, route in routes if route.cargo is Cargo.HOME}
    assert home == {(ranks - 1, k, k) for k in range(ranks - 1)}


def test_stage_comes_back_for_what_autograd_saved() -> None:
    """Its memory is given back between forward and backward, and written anew."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(3, 4, requires_grad=True)
    module(x).sum().backward()
    expected = [x.grad, *(p.grad for p in module.parameters())]
    x.grad = None
    module.zero_grad()
    stage = Stage(1, module, is_home=False)
    weights = [torch.randn(0)]
    assert all(p.shape == weights[0].shape for p in module.parameters())
    torch.manual_seed(0)
    twin = Stage(0, nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), is_home=True)
    stage.come()
    stage.flat.copy_(twin.flat)
    y = module(x)
    stage.leave()
    assert stage.flat.untyped_storage().nbytes() == 0
    stage.come()
    stage.flat.copy_(twin.flat)
    y.sum().backward()
    found = [x.grad, *(p.grad for p in module.parameters())]
    for a, b in zip(expected, found, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)
    flat = stage.take_gradients()
    assert flat.numel() == stage.flat.numel()
    assert all(p.grad is None for p in module.parameters())
