"""Which parameters are in groups, and where groups are refused; without other ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

import bytesched
from bytesched.plugins.c10d.grouping import grouping_of, has_groups
from bytesched.plugins.wave.cutting import refuse_uncuttable

BASE: Any = SimpleNamespace(rank=lambda: 1, size=lambda: 2)


def model(**attributes: Any) -> nn.Sequential:
    built = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for name, value in attributes.items():
        setattr(built[1], name, value)
    return built


def test_a_script_of_others_may_use_the_name() -> None:
    built = model(data_parallel_group=object())
    assert not grouping_of(built, None, BASE).ids
    assert not has_groups(built, None)


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda *of: bytesched.wrap(*of, kvstore=cast("Any", object())), "need torch.distributed"),
        (lambda optimizer, model: refuse_uncuttable(model, optimizer, 2), "waves have no groups"),
    ],
    ids=["a store", "waves"],
)
def test_where_there_are_no_groups_that_is_said(use: Any, said: str) -> None:
    built = model(data_parallel_group=None)
    with pytest.raises(bytesched.PluginError, match=said):
        use(torch.optim.SGD(built.parameters(), lr=0.1), built)
