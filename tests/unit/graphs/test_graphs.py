"""Partitions, pieces and layers of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from bytesched.errors import MismatchError, PluginError
from bytesched.plugins import graphs


def line(vertices: int = 4) -> graphs.Partition:
    """Edges from each vertex to the next one, and twice from the first to itself."""
    source = torch.tensor([*range(vertices - 1), 0, 0])
    target = torch.tensor([*range(1, vertices), 0, 0])
    owner = torch.zeros(vertices, dtype=torch.int64)
    return graphs.Partition(owner, source, target, torch.ones(len(source)))


def test_one_process_sums_along_edges_and_backwards_against_them() -> None:
    x = torch.tensor([[1.0], [10.0], [100.0], [1000.0]], requires_grad=True)
    y = graphs.aggregate(line(), x)
    assert y.view(-1).tolist() == [2.0, 1.0, 10.0, 100.0]
    y.backward(torch.tensor([[1.0], [2.0], [3.0], [4.0]]))
    assert x.grad is not None
    assert x.grad.view(-1).tolist() == [1 + 1 + 2.0, 3.0, 4.0, 0.0]


def test_rows_that_do_not_fit_are_refused() -> None:
    for x in (torch.ones(3, 1), torch.ones(4), torch.ones(4, 1).double()):
        with pytest.raises(MismatchError, match="rank 0 of the graph has rows that do not fit"):
            graphs.aggregate(line(), x)


INDEX = torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"owner": torch.tensor([0, 1])}, "owner must be from 0 to 0"),
        ({"source": torch.tensor([0, 2])}, "source must be from 0 to 1"),
        ({"target": torch.tensor([-1, 0])}, "target must be from 0 to 1"),
        ({"target": INDEX.int()}, "vectors of int64"),
        ({"weight": torch.ones(3)}, "one entry for each edge"),
        ({"weight": INDEX}, "weight a float"),
    ],
)
def test_what_is_no_graph_is_refused(changed: dict[str, Tensor], why: str) -> None:
    given: dict[str, Any] = {
        "owner": INDEX * 0,
        "source": INDEX,
        "target": INDEX,
        "weight": torch.ones(2),
    }
    with pytest.raises(PluginError, match=why):
        graphs.Partition(**(given | changed))


def test_a_graph_may_have_no_vertices_and_no_edges() -> None:
    none = torch.empty(0, dtype=torch.int64)
    part = graphs.Partition(none, none, none, torch.empty(0))
    x = torch.empty(0, 3, requires_grad=True)
    y = graphs.GraphConv(part, 3, 2)(x)
    y.sum().backward()
    assert y.shape == (0, 2)
    assert x.grad is not None


def test_layers_aggregate_where_rows_are_narrower() -> None:
    part = line()
    assert graphs.GraphConv(part, 2, 3).aggregates_first
    assert not graphs.GraphConv(part, 3, 2).aggregates_first
    assert graphs.GraphConv(part, 3, 2, is_first=True).aggregates_first
    x = torch.randn(4, 3)
    one, other = graphs.GraphConv(part, 3, 2), graphs.GraphConv(part, 3, 2, is_first=True)
    other.load_state_dict(one.state_dict())
    torch.testing.assert_close(one(x), other(x))


def test_a_copy_of_a_layer_shares_the_graph() -> None:
    layer = graphs.GraphConv(line(), 2, 2, is_first=True)
    x = torch.ones(4, 2)
    layer(x)
    twin = copy.deepcopy(layer)
    assert twin.partition is layer.partition
    assert twin.weight is not layer.weight
    assert twin(x).equal(layer(x))
