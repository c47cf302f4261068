"""Model-parallel waves: layers measured, and the memory of a part."""

from __future__ import annotations

import torch
from torch import nn

from bytesched.plugins.wave.cutting import layer_times_s
from bytesched.plugins.wave.stage import Stage


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


def test_an_absent_stage_has_no_memory() -> None:
    stage = Stage(1, nn.Sequential(nn.Linear(4, 2)), is_home=False)
    for _ in range(2):
        assert stage.flat.untyped_storage().nbytes() == 0
        assert not any(parameter.numel() for parameter in stage.parameters)
        stage.come()
        assert stage.flat.untyped_storage().nbytes() == stage.nbytes
        stage.leave()
