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
    with over(wire):
        return moe_cases.layer_equals_alone(gate, most_pieces, device=str(DEVICE))


def graph(wire: str, piece_bytes: int) -> list[str]:
    with over(wire):
        return graphs_cases.equals_alone("directed", piece_bytes, "features", str(DEVICE))
