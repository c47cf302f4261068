"""Experts and graphs whose rows are on a CUDA device: they go by all-to-alls."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from unittest import mock

import graphs_cases
import moe_cases
import torch
import torch.distributed as dist
from gpu_comparing import DEVICE
from gpu_scripts import nccl
from torch import Tensor

from bytesched.plugins import moe
from bytesched.plugins.exchanges.peers import Layers, Peers
from bytesched.plugins.routes.opening import open_group


@contextlib.contextmanager
def one_rank_over_nccl() -> Iterator[None]:
    """A rank that exchanges with itself, where it would be asked about nobody else."""
    with nccl() as group, contextlib.ExitStack() as stack:
        opened = open_group(group, "nccl", name="exchange/rows", timeout_s=100.0)
        peers = Peers(opened, Layers())
        stack.callback(peers.close)

        def of(_: object) -> Peers | None:
            return peers if dist.is_initialized() else None

        for name in ("moe.exchange", "moe.layer", "graphs.partition"):
            module = importlib.import_module(f"bytesched.plugins.{name}")
            stack.enter_context(mock.patch.object(module, "peers_of", of))
        yield


def over(wire: str) -> contextlib.AbstractContextManager[None]:
    return one_rank_over_nccl() if wire == "nccl" else contextlib.nullcontext()


def rows_exchanged(wire: str) -> list[str]:
    """What is wrong with rows, and their gradients, of one exchange and of a second one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    send, receive = moe_cases.splits("uneven", rank, size)
    wrong = []
    with over(wire):
        for turn in range(2):
            # Row k of the one for `to` says where it comes from, and which it is.
            marks = [[rank, to, k, turn] for to in range(size) for k in range(send[to])]
            x = torch.tensor(marks, dtype=torch.float32, device=DEVICE).requires_grad_()
            got = moe.exchange(x * 3, send, receive)
            (got * got.detach()).sum().backward()
            expected = [
                [3.0 * n for n in (by, rank, k, turn)]
                for by in range(size)
                for k in range(receive[by])
            ]
            if got.tolist() != expected:
                wrong.append(f"rows {got.tolist()} instead of {expected}")
            if x.grad is None or not torch.equal(x.grad, 9 * x.detach()):
                wrong.append(f"gradients {x.grad} of {x.tolist()}")
    return wrong


def experts(wire: str, gate: str, most_pieces: int) -> list[str]:
    """What differs from one process that has all experts."""
    rank, size = dist.get_rank(), dist.get_world_size()
    alone = moe_cases.layer_of(moe_cases.gate_of(gate), own=False).to(DEVICE)
    wrong = []
    with over(wire):
        ours = moe_cases.layer_of(moe_cases.gate_of(gate), own=True, most_pieces=most_pieces).to(
            DEVICE
        )
        for step in range(3):
            ours.zero_grad()
            alone.zero_grad()
            loss = moe_cases.loss_of(ours, batch(rank, step), rank, step)
            loss.backward()
            moe_cases.reduced(ours)
            expected = []
            with mock.patch.object(dist, "is_initialized", return_value=False):
                for other in range(size):
                    its = moe_cases.loss_of(alone, batch(other, step), other, step)
                    (its / size).backward()
                    expected.append(its.item())
            if abs(loss.item() - expected[rank]) > 1e-12 * max(1.0, abs(expected[rank])):
                wrong.append(f"loss {loss.item()} instead of {expected[rank]}")
            wrong += moe_cases.wrong_gradients(ours, alone)
            for one in (ours, alone):
                if isinstance(one.gate, moe.DTSGate):
                    one.gate.step()
        if ours.pieces != most_pieces:
            wrong.append(f"{ours.pieces} pieces instead of {most_pieces}")
    return wrong


def batch(rank: int, step: int) -> Tensor:
    return moe_cases.batch_of(rank, step).to(DEVICE)


def graph(wire: str, piece_bytes: int) -> list[str]:
    """What differs from one process that has the whole graph, forward and backward."""
    size = dist.get_world_size()
    drawn = graphs_cases.graph_of("directed", size)
    whole = graphs_cases.Graph(
        *(t.to(DEVICE) for t in (drawn.owner, drawn.source, drawn.target, drawn.weight))
    )
    features, classes = (t.to(DEVICE) for t in graphs_cases.rows_of())
    wrong = []
    with over(wire):
        part = whole.part(piece_bytes=piece_bytes)
        model = graphs_cases.GCN(part).to(DEVICE)
        alone = graphs_cases.GCN(whole.alone()).to(DEVICE)
        x = features[part.vertices].requires_grad_()
        all_x = features.clone().requires_grad_()
        for _ in range(2):
            scores, expected = model(x), alone(all_x)
            wrong += graphs_cases.far("scores", scores, expected[part.vertices])
            graphs_cases.loss_of(scores, classes[part.vertices]).backward()
            graphs_cases.loss_of(expected, classes).backward()
        for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            dist.all_reduce(ours.grad)
            wrong += graphs_cases.far(name, ours.grad, theirs.grad)
        assert x.grad is not None
        assert all_x.grad is not None
        wrong += graphs_cases.far("features", x.grad, all_x.grad[part.vertices])
    return wrong
