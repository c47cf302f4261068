"""How a session begins: which parameters are its own, and why an optimizer steps whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bytesched.config import Config
from bytesched.errors import PluginError
from bytesched.plugins.planned.beginning import slots_of, stays_plain, why_whole
from bytesched.plugins.planned.bundles import Slot


def model_and_optimizer() -> tuple[nn.Sequential, torch.optim.SGD]:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_slots_are_the_parameters_that_train_in_their_order() -> None:
    model, optimizer = model_and_optimizer()
    model[0].bias.requires_grad_(False)
    model.register_parameter("empty", nn.Parameter(torch.zeros(0)))
    assert [slot.name for slot in slots_of(model, optimizer, kind=Slot)] == [
        "0.weight",
        "1.weight",
        "1.bias",
    ]
    ignored = {id(model[1].weight)}
    slots = slots_of(model, optimizer, ignored=ignored, kind=Slot)
    assert [slot.name for slot in slots] == ["0.weight", "1.bias"]


def test_a_model_that_does_not_train_and_an_optimizer_of_another_one_are_refused() -> None:
    model, optimizer = model_and_optimizer()
    with pytest.raises(PluginError, match="the optimizer has no parameter of this model"):
        slots_of(model, model_and_optimizer()[1], kind=Slot)
    model.requires_grad_(False)
    with pytest.raises(PluginError, match="no parameter that requires a gradient"):
        slots_of(model, optimizer, kind=Slot)


def test_a_model_on_two_devices_is_refused() -> None:
    model, optimizer = model_and_optimizer()
    model[1].to("meta")
    with pytest.raises(PluginError, match=r"several devices: \['cpu', 'meta'\]"):
        slots_of(model, optimizer, kind=Slot)


def test_the_first_reason_to_step_whole_is_given() -> None:
    model, optimizer = model_and_optimizer()
    crossing = Config()
    assert why_whole(model, optimizer, torch.optim.SGD, crossing) == ""
    assert why_whole(model, optimizer, torch.optim.SGD, crossing, carried="of its own") == (
        "of its own"
    )
    off = Config(cross_barrier=False)
    assert why_whole(model, optimizer, torch.optim.SGD, off, carried="of its own") == (
        "cross_barrier is off"
    )
    assert "LBFGS" in why_whole(model, optimizer, torch.optim.LBFGS, crossing)


def test_what_stays_plain_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="bytesched"):
        assert not stays_plain("a model", "")
        assert stays_plain("a model", "there is one rank")
    assert caplog.messages == ["a model: left as it was: there is one rank"]
