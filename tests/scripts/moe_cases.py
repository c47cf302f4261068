"""What a rank does in the tests of mixture of experts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from exchange_cases import dying
from raised import prints_and_ends, raised
from torch import Tensor, nn
from torch.distributed.nn.functional import all_to_all_single
from torch.utils.checkpoint import checkpoint

from bytesched.errors import MismatchError
from bytesched.plugins import moe

WIDTH = 6
EXPERTS = 8
#: so small that there are as many pieces as may be
SMALL = 16


# -- the exchange ----------------------------------------------------------------------


def splits(pattern: str, rank: int, size: int) -> tuple[list[int], list[int]]:
    """How many rows a rank sends to each, and gets from each."""

    def rows(sender: int, receiver: int) -> int:
        return {
            "uneven": 1 + (sender + 2 * receiver) % 4,
            "some empty": 3 * ((sender + receiver) % 2),
            "one rank has none": 0 if sender == 1 else 2 + receiver,
            "to one alone": 4 if receiver == 0 else 0,
            "none": 0,
        }[pattern]

    return [rows(rank, k) for k in range(size)], [rows(k, rank) for k in range(size)]


def exchange(pattern: str, dtype: torch.dtype) -> list[str]:
    rank, size = dist.get_rank(), dist.get_world_size()
    send, receive = splits(pattern, rank, size)
    torch.manual_seed(rank)
    x = torch.randn(sum(send), WIDTH).to(dtype)
    weights = torch.randn(sum(receive), WIDTH).to(dtype)

    def outcome(exchanged: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        rows = x.clone().requires_grad_()
        got = exchanged(rows * 3)
        (got * weights).sum().backward()
        assert rows.grad is not None
        return got.detach(), rows.grad

    ours = outcome(lambda rows: moe.exchange(rows, send, receive))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        empty = x.new_empty(sum(receive), WIDTH)
        theirs = outcome(lambda rows: all_to_all_single(empty, rows, receive, send))
    pairs = zip(("rows", "gradients"), ours, theirs, strict=True)
    return [name for name, one, other in pairs if not torch.equal(one, other)]


def disagreements() -> list[str]:
    """The errors of ranks that do not fit each other, and of an exchange that does, at last."""
    rank, size = dist.get_rank(), dist.get_world_size()
    last = rank == size - 1
    send, receive = splits("uneven", rank, size)
    fewer = [receive[0] - last, *receive[1:]]
    rows = torch.ones(sum(send), WIDTH)
    wrong: list[tuple[Tensor, list[int], list[int]]] = [
        (rows, send, fewer),
        (rows.double() if last else rows, send, receive),
        (rows[:, 1:] if last else rows, send, receive),
        (rows[1:] if last else rows, send, receive),
        (rows, send[1:] if last else send, receive),
        (rows.clone().requires_grad_(last), send, receive),
    ]
    told = [
        raised(partial(moe.exchange, *given), MismatchError).removeprefix("MismatchError: ")
        for given in wrong
    ]
    with torch.no_grad():
        told.append(str(len(moe.exchange(rows, send, receive)) == sum(receive)))
    return told


def dies_in_a_dispatch() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    layer = layer_of(moe.TopKGate(WIDTH, EXPERTS), own=True)
    layer(torch.randn(32, WIDTH))
    with dying() if rank == size - 1 else nullcontext():
        prints_and_ends(lambda: layer(torch.randn(32, WIDTH)))


# -- the layer -------------------------------------------------------------------------


def experts_of(numbers: range, dtype: torch.dtype = torch.float64) -> list[nn.Module]:
    found: list[nn.Module] = []
    for number in numbers:
        torch.manual_seed(100 + number)
        layers = (nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        found.append(nn.Sequential(*layers).to(dtype))
    return found


def gate_of(kind: str, dtype: torch.dtype = torch.float64) -> moe.TopKGate | moe.DTSGate:
    torch.manual_seed(7)
    gate: moe.TopKGate | moe.DTSGate
    if kind == "dts":
        # So cold that some experts are not kept.
        gate = moe.DTSGate(WIDTH, EXPERTS, moe.Temperature(4, 0.3, 0.2), hard_after=2)
    else:
        gate = moe.TopKGate(WIDTH, EXPERTS, int(kind.removeprefix("top")))
    return gate.to(dtype)


def layer_of(
    gate: moe.TopKGate | moe.DTSGate,
    *,
    own: bool,
    most_pieces: int = 3,
    grid: moe.Grid | None = None,
) -> moe.MoE:
    """This rank's part of a layer, or all of it as one process has it."""
    dtype = gate.scores.weight.dtype
    if not own:
        with mock.patch.object(dist, "is_initialized", return_value=False):
            return moe.MoE(gate, experts_of(range(EXPERTS), dtype))
    group, replicas = (grid.expert_parallel, grid.data_parallel) if grid else (None, None)
    experts = experts_of(moe.own_experts(EXPERTS, group), dtype)
    return moe.MoE(gate, experts, group, replicas, most_pieces=most_pieces, piece_bytes=SMALL)


def batch_of(rank: int, step: int = 0, *, empty: bool = False) -> Tensor:
    torch.manual_seed(1000 * step + rank)
    return torch.randn(0 if empty else 3 + rank, 5, WIDTH, dtype=torch.float64)


def loss_of(layer: moe.MoE, x: Tensor, rank: int, step: int = 0) -> Tensor:
    # The noise of gates is drawn here.
    torch.manual_seed(50 + 10 * step + rank)
    y: Tensor = layer(x)
    return ((y + x) ** 3).sum() + 0.1 * layer.auxiliary_loss


class Alone:
    """One process that has all experts and computes the batches of all ranks."""

    def __init__(self, kind: str, empty_rank: int | None = None, device: str = "cpu") -> None:
        self.layer = layer_of(gate_of(kind), own=False).to(device)
        self.empty_rank = empty_rank
        self.device = device

    def losses(self, size: int, step: int = 0) -> list[float]:
        """Of each rank; their mean has been differentiated."""
        found = []
        with mock.patch.object(dist, "is_initialized", return_value=False):
            for rank in range(size):
                x = batch_of(rank, step, empty=rank == self.empty_rank)
                loss = loss_of(self.layer, x.to(self.device), rank, step)
                (loss / size).backward()
                found.append(loss.item())
        return found


def wrong_gradients(ours: moe.MoE, theirs: moe.MoE) -> list[str]:
    """Parameters whose gradients differ from those of one process, and by how much."""
    pairs = [("gate", ours.gate.scores.weight, theirs.gate.scores.weight)]
    for index, number in enumerate(ours.numbers):
        of_all = dict(theirs.experts[number].named_parameters())
        for name, parameter in ours.experts[index].named_parameters():
            pairs.append((f"{number}.{name}", parameter, of_all[name]))
    wrong = []
    for name, one, other in pairs:
        assert one.grad is not None, name
        # Alone, experts without a token have been called as well.
        assert other.grad is not None, name
        scale = max(1.0, other.grad.abs().max().item())
        difference = (one.grad - other.grad).abs().max().item() / scale
        if not difference < 1e-12:
            wrong.append(f"{name}: {difference}")
    return wrong


def reduced(layer: moe.MoE) -> None:
    moe.reduce_expert_gradients(layer)
    for parameter in layer.gate.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def layer_equals_alone(
    kind: str, most_pieces: int, empty_rank: int | None = None, device: str = "cpu"
) -> list[str]:
    rank, size = dist.get_rank(), dist.get_world_size()
    alone = Alone(kind, empty_rank, device)
    layer = layer_of(gate_of(kind), own=True, most_pieces=most_pieces).to(device)
    wrong = []
    for step in range(4):
        for one in (layer, alone.layer):
            one.zero_grad()
        x = batch_of(rank, step, empty=rank == empty_rank)
        loss = loss_of(layer, x.to(device), rank, step)
        loss.backward()
        reduced(layer)
        expected = alone.losses(size, step)[rank]
        if abs(loss.item() - expected) > 1e-12 * max(1.0, abs(expected)):
            wrong.append(f"loss {loss.item()} and {expected}")
        wrong += wrong_gradients(layer, alone.layer)
        for one in (layer, alone.layer):
            if isinstance(one.gate, moe.DTSGate):
                one.gate.step()
        if most_pieces != layer.pieces:
            wrong.append(f"{layer.pieces} pieces")
    return wrong


def bits_by_pieces(dtype: torch.dtype) -> list[int]:
    """With which numbers of pieces output and gradients have other bits than with one."""
    rank = dist.get_rank()
    found: dict[int, list[Tensor]] = {}
    for most_pieces in (1, 2, 3, 4):
        layer = layer_of(gate_of("top2", dtype), own=True, most_pieces=most_pieces)
        x = batch_of(rank).to(dtype).requires_grad_()
        loss_of(layer, x, rank).backward()
        assert layer.pieces == most_pieces, layer.pieces
        gradients = [p.grad for p in [x, *layer.parameters()]]
        found[most_pieces] = [g for g in gradients if g is not None]
        assert len(found[most_pieces]) == len(gradients)
    return [pieces for pieces in found if not all(map(torch.equal, found[1], found[pieces]))]


def used_in_many_ways() -> list[str]:
    """What gives other gradients: calls twice, accumulated, checkpointed; or has some itself."""
    rank = dist.get_rank()

    def gradients(run: Callable[[moe.MoE, Tensor], Any]) -> list[Tensor]:
        layer = layer_of(gate_of("dts"), own=True)
        x = batch_of(rank).requires_grad_()
        torch.manual_seed(rank)
        run(layer, x)
        return [p.grad for p in [x, *layer.parameters()] if p.grad is not None]

    def sums(layer: moe.MoE, x: Tensor) -> None:
        (loss_of(layer, x, rank) + loss_of(layer, 2 * x, rank)).backward()

    def accumulates(layer: moe.MoE, x: Tensor) -> None:
        loss_of(layer, x, rank).backward()
        loss_of(layer, 2 * x, rank).backward()

    def chained(layer: moe.MoE, x: Tensor) -> None:
        (layer(layer(x)) ** 2).sum().backward()

    def checkpointed(layer: moe.MoE, x: Tensor) -> None:
        first = checkpoint(layer, x, use_reentrant=False)
        (checkpoint(layer, first, use_reentrant=False) ** 2).sum().backward()

    def doubled(layer: moe.MoE, x: Tensor) -> None:
        (2 * loss_of(layer, x, rank)).backward()

    def kept(layer: moe.MoE, x: Tensor) -> None:
        loss = loss_of(layer, x, rank)
        loss.backward(retain_graph=True)
        loss.backward()

    wrong = []
    for one, other in ((sums, accumulates), (checkpointed, chained), (kept, doubled)):
        ours, theirs = gradients(one), gradients(other)
        assert len(ours) == len(theirs) > 1
        wrong += [one.__name__] * (not all(map(torch.allclose, ours, theirs)))
    layer = layer_of(gate_of("dts"), own=True).eval()
    with torch.no_grad():
        y = layer(batch_of(rank))
    return wrong + ["evaluated"] * (layer.kept != 1.0 or y.requires_grad)


def volume_falls() -> list[tuple[float, int]]:
    """Experts per token and pieces, as the temperature falls and the gate becomes hard."""
    found = []
    torch.manual_seed(5)
    gate = moe.DTSGate(WIDTH, EXPERTS, moe.Temperature(2, 1.0, 0.2), hard_after=3)
    layer = moe.MoE(
        gate, experts_of(moe.own_experts(EXPERTS), torch.float32), piece_bytes=6000, most_pieces=8
    )
    for _ in range(4):
        layer(torch.randn(200, WIDTH))
        found.append((layer.kept, layer.pieces))
        gate.step()
    return found


# -- the grid --------------------------------------------------------------------------


def grid_equals_alone() -> list[str]:
    """On 4 ranks, what differs from one process in gradients, norm and checkpoint."""
    rank, size = dist.get_rank(), dist.get_world_size()
    grid = moe.expert_groups(size // 2)
    layer = layer_of(gate_of("top2"), own=True, grid=grid)
    alone = Alone("top2")
    wrong = []
    if rank >= size // 2:
        # A replica of its own weights gets those of the first.
        with torch.no_grad():
            for parameter in layer.experts.parameters():
                parameter.mul_(2)
    layer = moe.MoE(layer.gate, layer.experts, grid.expert_parallel, grid.data_parallel)
    for name, value in layer.state_dict().items():
        if not torch.equal(value, alone.layer.state_dict()[name]):
            wrong.append(f"{name} is not that of the first replica")
    loss_of(layer, batch_of(rank), rank).backward()
    reduced(layer)
    alone.losses(size)
    wrong += wrong_gradients(layer, alone.layer)
    norm = moe.clip_grad_norm_(layer, 0.1)
    expected = nn.utils.clip_grad_norm_(alone.layer.parameters(), 0.1)
    if abs(norm / expected - 1) > 1e-12:
        wrong.append(f"norm {norm} and {expected}")
    wrong += [f"clipped: {line}" for line in wrong_gradients(layer, alone.layer)]
    return wrong


def checkpoints() -> list[str]:
    """What is wrong with the full file and those of ranks."""
    rank = dist.get_rank()
    layer = layer_of(gate_of("dts"), own=True)
    model = nn.Sequential(nn.Identity(), layer)
    alone = nn.Sequential(nn.Identity(), layer_of(gate_of("dts"), own=False))
    other = nn.Sequential(nn.Identity(), layer_of(gate_of("dts"), own=True))
    with torch.no_grad():
        for parameter in layer.experts.parameters():
            parameter.add_(rank + 1)
    full, own = moe.full_state_dict(model), model.state_dict()
    wrong = [] if sorted(full) == sorted(alone.state_dict()) else [f"names {sorted(full)}"]
    for loaded, file in ((alone, full), (other, full), (other, own)):
        with torch.no_grad():
            for parameter in loaded.parameters():
                parameter.zero_()
        loaded.load_state_dict(file)
        state = loaded.state_dict()
        wrong += [name for name in own if not torch.equal(state[name], own[name])]
    neighbours: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(neighbours, own)
    said = raised(lambda: other.load_state_dict(neighbours[rank - 1]), RuntimeError)
    return wrong + [said or "a file of another rank was loaded"] * ("Missing key" not in said)


def plain_data_parallel() -> list[str]:
    """What differs from one process under DistributedDataParallel, which leaves experts alone."""
    rank, size = dist.get_rank(), dist.get_world_size()
    layer = layer_of(gate_of("top1"), own=True)
    alone = Alone("top1")
    model = moe.data_parallel(layer)
    torch.manual_seed(50 + rank)
    x = batch_of(rank)
    y = model(x)
    (((y + x) ** 3).sum() + 0.1 * layer.auxiliary_loss).backward()
    moe.reduce_expert_gradients(model)
    alone.losses(size)
    first = next(layer.experts.parameters())
    assert torch.equal(first, next(alone.layer.experts[layer.numbers[0]].parameters()))
    return wrong_gradients(layer, alone.layer)
