"""How all-reduces run, and how long they take: a function of ranks, bytes, algorithm and library.

The numbers of messages and of bytes are those of Thakur, Rabenseifner and Gropp, "Optimization of
Collective Communication Operations in MPICH" (IJHPCA 2005), and for trees of Sanders, Speck and
Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan" (Parallel Computing
2009).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from bytesched.link.sizes import PROBE_WINDOW


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

#: what a collective costs besides its messages, in messages: with 2 of them it was measured to
#: take 0.4 ms of CPU time, with 6 of them 0.85 ms
MESSAGES_BY_ITSELF = 2


@dataclass(frozen=True, slots=True)
class Cores:
    """What one rank has, which its threads share; ranks on one machine have a part of it each.

    Processor sharing that wastes nothing: a thread runs at the speed of one core, or of what the
    others leave, or of its fair share if that is more. What the others want is what they use on
    average at full speed, so that no time depends on another one that is stretched.
    """

    per_rank: float = math.inf

    def __post_init__(self) -> None:
        if not self.per_rank > 0:
            raise ValueError(f"{self.per_rank} cores: a rank needs a part of one at least")

    def left(self, others: float) -> float:
        """Cores for threads beside others that want ``others`` of them."""
        fair = self.per_rank / (1.0 + max(1.0, others)) if others else self.per_rank
        return max(self.per_rank - others, fair)

    def stretch(self, wanted: float, others: float = 0.0) -> float:
        """How many times as long work takes that wants ``wanted`` cores for all of its time."""
        return max(1.0, wanted / self.left(others))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """The links of n ranks, each as fast, and how collectives use them.

    A collective begins when its last rank has issued it and those before it have left the links,
    occupies them for `occupied_s`, and is across `start_up_s` later.
    """

    ranks: int
    #: of each link, in either direction
    bytes_per_s: float
    #: of one message: start-up and way
    latency_s: float
    #: one of `ALGORITHMS`, or of `LIBRARIES`: what that library takes for each size
    algorithm: str = "ring"
    #: what it takes besides the messages of its algorithm
    delay_s: float = 0.0
    #: whether the next collective's bytes use the links while messages of this one are on the way
    overlaps: bool = True
    #: CPU time of each message on every rank, of which a collective costs two more by itself
    message_cpu_s: float = 0.0
    #: CPU time of each byte: it is copied, summed, sent and received
    byte_cpu_s: float = 0.0
    #: of each rank, for communication: what its other threads leave
    cores: float = math.inf

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise ValueError(f"{self.ranks} ranks have nothing to send each other: at least 2")
        known = (*ALGORITHMS, *LIBRARIES)
        if self.algorithm not in known:
            raise ValueError(f"no algorithm {self.algorithm!r}; there are {', '.join(known)}")
        least = min(self.latency_s, self.delay_s, self.message_cpu_s, self.byte_cpu_s)
        if not self.bytes_per_s > 0 or least < 0 or not self.cores > 0:
            raise ValueError(f"no such links: {self}")

    @property
    def gradient_bytes_per_s(self) -> float:
        """Bytes of gradients that large all-reduces average per second, without any start-up."""
        return self.bytes_per_s / self._algorithm(LARGE_BYTES).bytes_per_byte(self.ranks)

    def occupied_s(self, nbytes: float) -> float:
        """How long the links carry an all-reduce.

        They wait for cores where these cannot keep up, and for a part of what its messages wait:
        while they do, the links carry the other collective that is under way.
        """
        sent = nbytes * self._algorithm(nbytes).bytes_per_byte(self.ranks)
        busy_s = sent / self.bytes_per_s
        if not self.overlaps:
            return max(busy_s + self._messages_s(nbytes), self._cpu_bound_s(nbytes))
        late_s = self._late_s(nbytes) / PROBE_WINDOW
        return max(busy_s + late_s, self._cpu_bound_s(nbytes))

    def start_up_s(self, nbytes: float) -> float:
        """How much later it is across."""
        return self.delay_s + (self._messages_s(nbytes) if self.overlaps else 0.0)

    def cpu_s(self, nbytes: float) -> float:
        """CPU time of a collective on each rank."""
        return self._message_work_s(nbytes) + nbytes * self.byte_cpu_s

    def _message_work_s(self, nbytes: float) -> float:
        messages = self._algorithm(nbytes).messages(self.ranks)
        return self.message_cpu_s * (messages + MESSAGES_BY_ITSELF)

    def _late_s(self, nbytes: float) -> float:
        """How long its messages wait for a core.

        All ranks need one at the same moment, as they run in step, so none has that of another.
        """
        return self._message_work_s(nbytes) * (1.0 / min(1.0, self.cores) - 1.0)

    def _cpu_bound_s(self, nbytes: float) -> float:
        return self.cpu_s(nbytes) / self.cores

    def _messages_s(self, nbytes: float) -> float:
        sent_s = self._algorithm(nbytes).messages(self.ranks) * self.latency_s
        return sent_s + self._late_s(nbytes)

    def _algorithm(self, nbytes: float) -> Algorithm:
        name = self.algorithm
        if name in LIBRARIES:
            name = LIBRARIES[name](self.ranks, nbytes, self.bytes_per_s, self.latency_s)
        return ALGORITHMS[name]
