"""How all-reduces run: the steps and bytes of each algorithm, and which one a library takes.

The numbers of messages and of bytes are those of Thakur, Rabenseifner and Gropp, "Optimization of
Collective Communication Operations in MPICH" (IJHPCA 2005), and for trees of Sanders, Speck and
Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan" (Parallel Computing
2009).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple

__all__ = ["ALGORITHMS", "GLOO_RANKS", "LARGE_BYTES", "LIBRARIES", "Algorithm"]


class Algorithm(NamedTuple):
    """What an all-reduce among n ranks takes."""

    #: messages one after another
    messages: Callable[[int], int]
    #: bytes that each link carries in either direction, per byte
    bytes_per_byte: Callable[[int], float]


def _log2(ranks: int) -> int:
    return math.ceil(math.log2(ranks))


ALGORITHMS: Final = {
    # Each rank sends 1/n of the bytes to its neighbour, 2(n-1) times.
    "ring": Algorithm(lambda n: 2 * (n - 1), lambda n: 2 * (n - 1) / n),
    # Up two binary trees and down, half of the bytes each, in pieces that follow one another.
    "tree": Algorithm(lambda n: 2 * _log2(n), lambda n: 2.0),
    # Each rank sends every other one its share at once, and then its sum.
    "exchange": Algorithm(lambda n: 2, lambda n: 2 * (n - 1) / n),
    # Recursive doubling: all bytes to one partner after the other.
    "doubling": Algorithm(_log2, lambda n: float(_log2(n))),
    # Rabenseifner's: half, a quarter, ... of the bytes to one partner after the other, and back.
    "halving": Algorithm(lambda n: 2 * _log2(n), lambda n: 2 * (n - 1) / n),
}

#: what counts as large: the rate of such messages is that of the links
LARGE_BYTES: Final = 1 << 40
#: as many as may be thought to use Gloo, which has a ring alone
GLOO_RANKS: Final = 16
#: up to this size MPICH doubles (MPIR_CVAR_ALLREDUCE_SHORT_MSG_SIZE)
_MPI_SHORT_BYTES: Final = 2048


def _of_nccl(ranks: int, nbytes: float, bytes_per_s: float, latency_s: float) -> str:
    """Ring or trees, whichever its model of latency and bandwidth finds faster.

    That is what NCCL does (src/graph/tuning.cc), with tables of its own hardware for both.
    """

    def estimated_s(name: str) -> float:
        algorithm = ALGORITHMS[name]
        sent_s = nbytes * algorithm.bytes_per_byte(ranks) / bytes_per_s
        return algorithm.messages(ranks) * latency_s + sent_s

    return min(("ring", "tree"), key=estimated_s)


def _of_mpi(ranks: int, nbytes: float, bytes_per_s: float, latency_s: float) -> str:
    return "doubling" if nbytes <= _MPI_SHORT_BYTES else "halving"


#: what a library takes for a number of ranks and of bytes, on links of a rate and a latency
LIBRARIES: Final[dict[str, Callable[[int, float, float, float], str]]] = {
    # Gloo's among few ranks; among more, where nobody takes a ring for everything, MPI's.
    "auto": lambda ranks, *link: "ring" if ranks <= GLOO_RANKS else _of_mpi(ranks, *link),
    # A ring at any size and among any number of ranks: gloo/allreduce.cc runs one unless a caller
    # names another algorithm, and neither torch's ProcessGroupGloo nor Horovod does; Gloo's halving
    # and doubling belong to its old interface.
    "gloo": lambda *_: "ring",
    # As MPICH chooses (src/mpi/coll/allreduce/allreduce.c, and the paper above). Open MPI doubles
    # up to 10,000 bytes, and takes a ring or halving above, by the number of ranks
    # (coll_tuned_decision_fixed.c); both send the same bytes.
    "mpi": _of_mpi,
    "nccl": _of_nccl,
}
