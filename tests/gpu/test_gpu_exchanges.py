"""Experts and graphs on a GPU: rows and results are those of one process, by all-to-alls.

Over Gloo two ranks share the device; over NCCL a rank exchanges with itself.
"""

from __future__ import annotations

import gpu_exchanges as scripts
import pytest
from cuda_tests import ON_CUDA, needs_nccl
from ranks import Ranks

pytestmark = ON_CUDA

wires = pytest.mark.parametrize("wire", ["gloo", pytest.param("nccl", marks=needs_nccl)])


@pytest.fixture
def ranks(wire: str, one_rank: Ranks, two_ranks: Ranks) -> Ranks:
    return one_rank if wire == "nccl" else two_ranks


def check(found: list[list[str]]) -> None:
    for rank, wrong in enumerate(found):
        assert not wrong, f"rank {rank}:\n" + "\n".join(wrong)


@wires
def test_rows_and_gradients_arrive(wire: str, ranks: Ranks) -> None:
    check(ranks.run(scripts.rows_exchanged, wire))


@wires
@pytest.mark.parametrize(("gate", "pieces"), [("top1", 1), ("top2", 4), ("dts", 2)])
def test_experts_equal_one_process(wire: str, ranks: Ranks, gate: str, pieces: int) -> None:
    check(ranks.run(scripts.experts, wire, gate, pieces))


@wires
@pytest.mark.parametrize("piece_bytes", [1 << 20, 64])
def test_a_graph_equals_one_process(wire: str, ranks: Ranks, piece_bytes: int) -> None:
    """A rank that has the whole graph exchanges no rows, but agrees on them with itself."""
    check(ranks.run(scripts.graph, wire, piece_bytes))
