"""Which algorithm a library takes, and how many messages that is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytesched.link.fabric import ALGORITHMS, GLOO_RANKS, LIBRARIES, Fabric

LATENCY_S = 30e-6


def taken(library: str, ranks: int, nbytes: float) -> str:
    return LIBRARIES[library](ranks, nbytes, 1.25e9, LATENCY_S)


@pytest.mark.parametrize(
    ("library", "ranks", "nbytes", "expected"),
    [
        ("gloo", 2, 4, "ring"),
        ("gloo", 1024, 4, "ring"),
        ("mpi", 2, 2048, "doubling"),
        ("mpi", 1024, 2048, "doubling"),
        ("mpi", 1024, 2049, "halving"),
        ("nccl", 4, 1 << 30, "ring"),
        ("nccl", 1024, 4096, "tree"),
        ("nccl", 1024, 1 << 36, "ring"),
        ("auto", GLOO_RANKS, 4, "ring"),
        ("auto", GLOO_RANKS + 1, 4, "doubling"),
        ("auto", 1024, 1 << 20, "halving"),
    ],
)
def test_what_a_library_takes(library: str, ranks: int, nbytes: int, expected: str) -> None:
    assert taken(library, ranks, nbytes) == expected


@pytest.mark.parametrize(("library", "steps"), [("auto", 10), ("mpi", 10), ("nccl", 20)])
def test_small_messages_of_a_thousand_ranks_take_few_steps(library: str, steps: int) -> None:
    fabric = Fabric(ranks=1024, bytes_per_s=1.25e9, latency_s=LATENCY_S, algorithm=library)
    assert fabric.start_up_s(1024) == pytest.approx(steps * LATENCY_S)
    assert fabric.start_up_s(1 << 20) <= 20 * LATENCY_S * (1 + 1e-12)


@given(st.integers(2, 4096))
def test_no_all_reduce_sends_less_than_it_must(ranks: int) -> None:
    """2(n-1)/n bytes for each, and log2 n messages, or two if all talk to all."""
    for name, algorithm in ALGORITHMS.items():
        assert algorithm.bytes_per_byte(ranks) >= 2 * (ranks - 1) / ranks
        assert algorithm.messages(ranks) >= (2 if name == "exchange" else (ranks - 1).bit_length())
