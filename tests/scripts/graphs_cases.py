"""What a rank does in the tests of graphs that ranks share out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from exchange_cases import dying
from raised import prints_and_ends, raised
from torch import Tensor, nn
from torch.nn import functional

import bytesched
from bytesched.errors import MismatchError
from bytesched.plugins import graphs
from bytesched.plugins.exchanges.peers import Peers
from bytesched.plugins.graphs.layer import laps
from bytesched.plugins.graphs.pieces import by_rows, product
from bytesched.report.shares import shares_of
from bytesched.trace.reading import read_traces
from bytesched.trace.timeline import trace_name

VERTICES, WIDTH, CLASSES = 60, 5, 3


@dataclass(frozen=True)
class Graph:
    owner: Tensor
    source: Tensor
    target: Tensor
    weight: Tensor

    def to(self, device: str) -> Graph:
        return Graph(*(tensor.to(device) for tensor in vars(self).values()))

    def part(self, **options: Any) -> graphs.Partition:
        """This rank's; collective."""
        return graphs.Partition(self.owner, self.source, self.target, self.weight, **options)

    def alone(self) -> graphs.Partition:
        """All of it, as one process has it."""
        with mock.patch.object(dist, "is_initialized", return_value=False):
            owner = torch.zeros_like(self.owner)
            return graphs.Partition(owner, self.source, self.target, self.weight)


def graph_of(kind: str, size: int, dtype: torch.dtype = torch.float64) -> Graph:
    random = torch.Generator().manual_seed(3)

    def drawn(high: int, count: int) -> Tensor:
        return torch.randint(high, (count,), generator=random)

    owner = drawn(size, VERTICES)
    source, target = drawn(VERTICES, 400), drawn(VERTICES, 400)
    crosses = owner[source] != owner[target]
    if kind == "empty halos":
        source, target = source[~crosses], target[~crosses]
    elif kind == "no inner edges":
        source, target = source[crosses], target[crosses]
    elif kind == "one way":
        # Edges come from the first rank alone.
        source, target = source[owner[source] == 0], target[owner[source] == 0]
    elif kind == "a rank has no vertices":
        owner = owner % (size - 1)
    elif kind == "one rank alone is needed by one":
        keep = ~crosses | ((owner[source] == 0) & (owner[target] == size - 1))
        source, target = source[keep], target[keep]
    else:
        assert kind == "directed", kind
    weight = torch.rand(len(source), generator=random, dtype=torch.float64).to(dtype)
    return Graph(owner, source, target, weight)


class GCN(nn.Module):
    def __init__(self, partition: graphs.Partition) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = graphs.GraphConv(partition, WIDTH, 7, is_first=True)
        self.second = graphs.GraphConv(partition, 7, 7)
        self.third = graphs.GraphConv(partition, 7, 9, bias=False)
        self.last = graphs.GraphConv(partition, 9, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second, self.third):
            x = layer(x).relu()
        scores: Tensor = self.last(x)
        return scores


def rows_of(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(5)
    x = torch.randn(VERTICES, WIDTH, generator=random, dtype=torch.float64)
    return x.to(dtype), torch.randint(CLASSES, (VERTICES,), generator=random)


def loss_of(scores: Tensor, classes: Tensor) -> Tensor:
    return functional.cross_entropy(scores, classes, reduction="sum") / VERTICES


def far(name: str, one: Tensor, other: Tensor) -> list[str]:
    """A line if two tensors differ by more than rounding does."""
    scale = max(1.0, other.abs().max().item() if len(other) else 0.0)
    difference = (one - other).abs().max().item() / scale if len(other) else 0.0
    return [] if one.shape == other.shape and difference < 1e-12 else [f"{name}: {difference}"]


def equals_alone(
    kind: str, piece_bytes: int, needing: str = "weights", device: str = "cpu"
) -> list[str]:
    graph = graph_of(kind, dist.get_world_size()).to(device)
    part = graph.part(piece_bytes=piece_bytes)
    model, alone = GCN(part).to(device), GCN(graph.alone()).to(device)
    features, classes = (each.to(device) for each in rows_of())
    x = features[part.vertices].requires_grad_(needing == "features")
    all_x = features.clone().requires_grad_(needing == "features")
    wrong = []
    for _ in range(2):
        scores, expected = model(x), alone(all_x)
        wrong += far("scores", scores, expected[part.vertices])
        loss_of(scores, classes[part.vertices]).backward()
        loss_of(expected, classes).backward()
    for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert ours.grad is not None, name
        assert theirs.grad is not None, name
        dist.all_reduce(ours.grad)
        wrong += far(name, ours.grad, theirs.grad)
    if needing == "features":
        assert x.grad is not None
        assert all_x.grad is not None
        wrong += far("features", x.grad, all_x.grad[part.vertices])
    return wrong


def number_of_pieces(kind: str, piece_bytes: int) -> int:
    graph = graph_of(kind, dist.get_world_size())
    return len(graph.part(piece_bytes=piece_bytes).pieces(8 * WIDTH))


def bits(dtype: torch.dtype) -> list[str]:
    """Of what sums and gradients have not the bits: of one piece, of one sum, of one process."""
    rank, size = dist.get_rank(), dist.get_world_size()
    graph = graph_of("directed", size, dtype)
    features, _ = rows_of(dtype)
    found = []
    wrong = []
    for piece_bytes in (1 << 20, 1, 64, 100, 1):
        part = graph.part(piece_bytes=piece_bytes)
        x = features[part.vertices].requires_grad_()
        y = graphs.aggregate(part, x)
        (y**2).sum().backward()
        assert x.grad is not None
        found.append((y.detach(), x.grad))
        if not all(map(torch.equal, found[0], found[-1])):
            wrong.append(f"pieces of {piece_bytes}")
    # Own neighbours first, then the others in the order in which they arrive.
    everything = torch.cat([part.vertices, part.halo])
    place = torch.empty(VERTICES, dtype=torch.int64)
    place[everything] = torch.arange(len(everything))
    mine = graph.owner[graph.target] == rank
    matrix = torch.sparse_coo_tensor(
        torch.stack([place[graph.target[mine]], place[graph.source[mine]]]),
        graph.weight[mine],
        (len(part.vertices), len(everything)),
    )
    in_order = product(by_rows(matrix.coalesce()), features[everything])
    wrong += ["one sum"] * (not torch.equal(found[0][0], in_order))
    # Whole numbers have no rounding, so that every order gives the same bits.
    whole = Graph(graph.owner, graph.source, graph.target, (8 * graph.weight).round())
    part = whole.part()
    sums = graphs.aggregate(part, features[part.vertices].round())
    alone = graphs.aggregate(whole.alone(), features.round())
    wrong += ["whole numbers"] * (not torch.equal(sums, alone[part.vertices]))
    # Rows whose neighbours are all here have the bits of one process.
    graph = graph_of("one rank alone is needed by one", size, dtype)
    part = graph.part()
    crosses = graph.owner[graph.source] != graph.owner[graph.target]
    is_inner = torch.ones(VERTICES, dtype=torch.bool)
    is_inner[graph.target[crosses]] = False
    inner = is_inner[part.vertices]
    sums = graphs.aggregate(part, features[part.vertices])[inner]
    alone = graphs.aggregate(graph.alone(), features)[part.vertices][inner]
    assert rank == size - 1 or len(sums)
    return wrong + ["inner rows"] * (not torch.equal(sums, alone))


def trained(piece_bytes: int) -> list[str]:
    """What differs from one process after steps with weights reduced by `bytesched.wrap`."""
    size = dist.get_world_size()
    graph = graph_of("directed", size)
    part = graph.part(piece_bytes=piece_bytes)
    features, classes = rows_of()
    model, alone = GCN(part), GCN(graph.alone())
    ours: Any = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    theirs = torch.optim.SGD(alone.parameters(), lr=0.3, momentum=0.9)
    ours = bytesched.wrap(ours, model)
    x = features[part.vertices]
    for _ in range(8):
        ours.zero_grad()
        theirs.zero_grad()
        (loss_of(model(x), classes[part.vertices]) * size).backward()
        loss_of(alone(features), classes).backward()
        ours.step()
        theirs.step()
    bytesched.unwrap(ours)
    return [
        line
        for (name, one), other in zip(model.named_parameters(), alone.parameters(), strict=True)
        for line in far(name, one.detach(), other.detach())
    ]


def keeps_inputs() -> list[str]:
    """What goes wrong where the first layer exchanges rows once while its inputs stay."""
    part = graph_of("directed", dist.get_world_size()).part()
    layer = graphs.GraphConv(part, WIDTH, 4, is_first=True)
    x = rows_of()[0][part.vertices]
    fresh = layer(x)
    wrong = []

    def check(name: str, x: Tensor, *, exchanges: bool, expected: Tensor | None = None) -> None:
        with mock.patch.object(Peers, "start", autospec=True, side_effect=Peers.start) as start:
            y: Tensor = layer(x)
        equals = expected is None or y.equal(expected)
        if (start.call_count > 0) is not exchanges or not equals:
            wrong.append(name)

    def computed() -> Tensor:
        return functional.linear(graphs.aggregate(part, x), layer.weight, layer.bias)

    check("again", x, exchanges=False, expected=fresh)
    with torch.no_grad():
        layer.weight.mul_(2)
        check("without gradient", x, exchanges=False, expected=computed())
        x.mul_(3)
    check("changed in place", x, exchanges=True, expected=computed())
    check("another tensor", x.clone(), exchanges=True)
    check("that needs a gradient", x.clone().requires_grad_(), exchanges=True)
    with torch.inference_mode():
        check("in inference", x.clone(), exchanges=True)
    return wrong


def traced(folder: str) -> tuple[dict[str, float], float, bool]:
    """Shares of epochs, how long halos were under way, and whether another layer is told."""
    graph = graph_of("directed", dist.get_world_size())
    part = graph.part(piece_bytes=64)
    model = GCN(part)
    features, classes = rows_of()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.3)
    optimizer = bytesched.wrap(optimizer, model, timeline=folder)
    for _ in range(6):
        optimizer.zero_grad()
        loss_of(model(features[part.vertices]), classes[part.vertices]).backward()
        optimizer.step()
    bytesched.unwrap(optimizer)
    (trace,) = read_traces(Path(folder) / trace_name(dist.get_rank()))
    found = shares_of(trace)
    return found, found.pop("on its way"), bool(laps()._observers)


# -- errors ----------------------------------------------------------------------------


def disagreements() -> list[str]:
    """The errors of ranks that were given what does not fit; and the sum of one that fits."""
    rank, size = dist.get_rank(), dist.get_world_size()
    last = int(rank == size - 1)
    graph = graph_of("directed", size)
    good = vars(graph)
    differing: list[dict[str, Any]] = [
        {"owner": graph.owner.roll(last)},
        {
            "owner": graph.owner[: VERTICES - last],
            "source": graph.source % 50,
            "target": graph.target % 50,
        },
        {"source": graph.source + VERTICES * last},
        {"weight": graph.weight[last:]},
        {"weight": graph.weight.float() if last else graph.weight},
        {"owner": graph.owner + size * last},
        {"piece_bytes": 64 + last},
    ]
    part = graph.part()
    x = rows_of()[0][part.vertices]
    rows = (x[last:], x.float() if last else x, x[:, last:], x.clone().requires_grad_(bool(last)))
    with mock.patch.object(Peers, "start", side_effect=AssertionError("sent")):
        calls: list[Callable[[], object]] = [
            *(partial(graphs.Partition, **good | change) for change in differing),
            *(partial(graphs.aggregate, part, each) for each in rows),
        ]
        told = [raised(call, MismatchError).partition(": ")[2] for call in calls]
    told.append(str(len(graphs.aggregate(part, x)) == len(part.vertices)))
    return told


def dies_in_an_exchange(direction: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    part = graph_of("directed", size).part()
    features, _ = rows_of()
    x = features[part.vertices].requires_grad_()

    def exchange(*, dies: bool) -> None:
        with dying() if dies and direction == "forward" else nullcontext():
            y = graphs.aggregate(part, x)
        with dying() if dies else nullcontext():
            y.sum().backward()

    exchange(dies=False)
    prints_and_ends(partial(exchange, dies=rank == size - 1))


def raises_in_the_middle() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    graph = graph_of("directed", size)
    model = GCN(graph.part())
    features, _ = rows_of()
    x = features[model.first.partition.vertices]
    model(x)
    if rank == size - 1:
        with mock.patch.object(functional, "linear", side_effect=ValueError("in the middle")):
            model(x)
    prints_and_ends(partial(model, x))


def in_another_layer(kind: str) -> None:
    """Rows of two widths, both of which ranks have compared: then each rank sends others."""
    rank, size = dist.get_rank(), dist.get_world_size()
    part = graph_of(kind, size).part()
    rows = [torch.ones(len(part.vertices), width, dtype=part.dtype) for width in (4, 8)]
    for x in rows:
        graphs.aggregate(part, x)

    def exchange() -> None:
        for number in (rank, rank + 1):
            graphs.aggregate(part, rows[number % 2])

    prints_and_ends(exchange)


def goes_on_elsewhere() -> None:
    """The last rank catches an error of its own and begins anew, while others go on."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = GCN(graph_of("directed", size).part())
    features, classes = rows_of()
    x, y = features[model.first.partition.vertices], classes[model.first.partition.vertices]

    def train(steps: int) -> None:
        for _ in range(steps):
            loss_of(model(x), y).backward()

    def goes_on() -> None:
        if rank == size - 1:
            # As if an error had been caught after the second layer.
            model.second(model.first(x).relu())
        train(2)

    train(1)
    prints_and_ends(goes_on)
