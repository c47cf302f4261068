"""Which parameters are in groups, and where groups are refused; without other ranks."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bytesched
from bytesched.plugins.c10d.grouping import Grouping, grouping_of, has_groups
from bytesched.plugins.wave.cutting import refuse_uncuttable


class Base:
    """A process group as far as it matters here."""

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 2


BASE = cast("dist.ProcessGroup", Base())


def model(**attributes: Any) -> nn.Sequential:
    built = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for name, value in attributes.items():
        setattr(built[1], name, value)
    return built


def test_a_layer_says_it() -> None:
    built = model(data_parallel_group=None)
    grouping = grouping_of(built, {}, BASE)
    assert grouping.ids == grouping.parted == {id(p) for p in built[1].parameters()}
    assert [grouping.of(p) for p in built.parameters()] == [(0, 1), (0, 1), (1,), (1,)]


def test_a_script_of_others_may_use_the_name() -> None:
    built = model(data_parallel_group=object())
    assert not grouping_of(built, None, BASE).ids
    assert not has_groups(built, None)


def test_layer_and_mapping_may_say_the_same() -> None:
    built = model(data_parallel_group=None)
    grouping = grouping_of(built, {built[1]: None, built[0].bias: None}, BASE)
    assert grouping.parted == {id(p) for p in [*built[1].parameters(), built[0].bias]}


def test_what_is_outside_a_group() -> None:
    grouping = Grouping(4, {1: (0, 2), 2: (1, 3)})
    outside = grouping.outside([0, 2])
    assert 1 not in outside
    assert 2 in outside
    assert 3 in outside


@pytest.mark.parametrize(
    ("key", "group", "said"),
    [
        (nn.Linear(2, 2), None, "groups has a Linear that is neither a parameter nor a module"),
        ("1.weight", None, "groups has a str that is neither"),
        (None, dist.GroupMember.NON_GROUP_MEMBER, "is a group that rank 1 is not in"),
        (None, [0, 1], "is a list, neither a ProcessGroup nor None"),
    ],
)
def test_refused(key: Any, group: Any, said: str) -> None:
    built = model()
    with pytest.raises(bytesched.PluginError, match=said):
        grouping_of(built, {built[1] if key is None else key: group}, BASE)


def test_a_store_has_no_groups() -> None:
    built = model(data_parallel_group=None)
    optimizer = torch.optim.SGD(built.parameters(), lr=0.1)
    with pytest.raises(bytesched.PluginError, match=r"need torch\.distributed"):
        bytesched.wrap(optimizer, built, kvstore=cast("Any", object()))


def test_waves_have_no_groups() -> None:
    built = model(data_parallel_group=None)
    optimizer = torch.optim.SGD(built.parameters(), lr=0.1)
    with pytest.raises(bytesched.PluginError, match="waves have no groups"):
        refuse_uncuttable(built, optimizer, 2)
