"""Which modules are found around parameters; and the line at the end of a script."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from bytesched.plugins.left import name_of_ddp, summary
from bytesched.plugins.script.owners import compiled_around, owners_of, parameter_ids


class Unfinished(nn.Module):
    """A module whose constructor never ran."""

    def __init__(self) -> None:
        pass


def around(module: nn.Module) -> list[type[nn.Module]]:
    return sorted(map(type, owners_of(parameter_ids(module))), key=lambda kind: kind.__name__)


def test_all_modules_around_all_parameters_are_found() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    trainer, unfinished = nn.ModuleDict({"model": inner, "loss": nn.MSELoss()}), Unfinished()
    assert around(inner) == [nn.ModuleDict, nn.Sequential]
    assert around(inner[0]) == [nn.Linear, nn.ModuleDict, nn.Sequential]
    assert around(nn.ModuleList([inner, nn.Linear(3, 3)])) == [nn.ModuleList]
    del trainer, unfinished


def test_frozen_parameters_do_not_count() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    assert around(model) == [nn.Linear, nn.Sequential]


def test_scripted_modules_are_no_obstacle() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(nn.Linear(2, 2))
    model = nn.Sequential(scripted, nn.Linear(2, 2))
    assert around(model) == [nn.Sequential]
    assert compiled_around(model) == []


def test_compiled_module_is_found() -> None:
    model = nn.Linear(2, 2)
    compiled: Any = torch.compile(model, backend="eager")
    other = torch.compile(nn.Linear(2, 2), backend="eager")
    assert compiled_around(model) == [compiled]
    assert compiled in owners_of(parameter_ids(model))
    del other


FIGURES: dict[str, int | float | str] = {
    "model": "Net",
    "mode": "cross",
    "comm_ms": 98.0,
    "overlap_pct": 62.2,
    "barrier_crossed_pct": 3.4,
    "iterations": 500,
    "steps": 1001,
    "reason": "",
}


WRAPPED = (
    "mode cross: hid 61 of 98 ms of communication per iteration (62 %), 3 % of the bytes crossed "
    "the barrier, 500 iterations"
)


@pytest.mark.parametrize(
    ("figures", "left", "told"),
    [
        ([FIGURES], [], [WRAPPED]),
        ([FIGURES | {"reason": "step(closure)"}], [], [f"{WRAPPED}: step(closure)"]),
        (
            [FIGURES | {"iterations": 0, "comm_ms": 0.0, "overlap_pct": 0.0}],
            [],
            ["mode cross: too short to say what it brought"],
        ),
        (
            [FIGURES | {"comm_ms": 0.0}],
            [],
            ["mode cross: 3 % of the bytes crossed the barrier, 500 iterations"],
        ),
        (
            [FIGURES, FIGURES | {"model": "Critic"}, FIGURES],
            [],
            [f"{name}: {WRAPPED}" for name in ("Net 1", "Critic", "Net 2")],
        ),
        ([], [], []),
        ([{"mode": "plain"}], ["one: no step"], ["mode plain: one: no step"]),
        ([FIGURES | {"error": "ValueError: x"}], [], [f"{WRAPPED}, ended by ValueError: x"]),
        ([FIGURES], ["Critic: join()"], [f"Net: {WRAPPED}", "mode plain: Critic: join()"]),
    ],
)
def test_the_last_lines(figures: list[Any], left: list[str], told: list[str]) -> None:
    assert summary(figures, left) == told


def test_models_of_one_class_have_names_of_their_own() -> None:
    class Net(nn.Linear):
        pass

    first, second = Net(2, 2), Net(2, 2)
    names = ["DistributedDataParallel of Net", "DistributedDataParallel of Net 2"]
    assert [*map(name_of_ddp, (first, second, first))] == [*names, names[0]]
    del first
    assert name_of_ddp(Net(2, 2)) == names[0], "of one that is gone"
