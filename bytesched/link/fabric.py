"""How long a collective takes: a function of ranks, bytes and algorithm."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bytesched.link.algorithms import ALGORITHMS, LARGE_BYTES, LIBRARIES, Algorithm
from bytesched.link.sizes import PROBE_WINDOW

__all__ = ["MESSAGES_BY_ITSELF", "Cores", "Fabric"]

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

    def occupied_s(self, nbytes: float, share: float = 1.0) -> float:
        """How long the links carry ``share`` of an all-reduce: 1/2 is a reduce-scatter.

        They wait for cores where these cannot keep up, and for a part of what its messages wait:
        while they do, the links carry the other collective that is under way.
        """
        sent = share * nbytes * self._algorithm(nbytes).bytes_per_byte(self.ranks)
        busy_s = sent / self.bytes_per_s
        if not self.overlaps:
            return max(busy_s + self._messages_s(nbytes, share), self._cpu_bound_s(nbytes, share))
        late_s = self._late_s(nbytes, share) / PROBE_WINDOW
        return max(busy_s + late_s, self._cpu_bound_s(nbytes, share))

    def start_up_s(self, nbytes: float, share: float = 1.0) -> float:
        """How much later it is across."""
        return self.delay_s + (self._messages_s(nbytes, share) if self.overlaps else 0.0)

    def cpu_s(self, nbytes: float, share: float = 1.0) -> float:
        """CPU time of a collective on each rank."""
        return self._message_work_s(nbytes, share) + share * nbytes * self.byte_cpu_s

    def _message_work_s(self, nbytes: float, share: float) -> float:
        messages = share * self._algorithm(nbytes).messages(self.ranks)
        return self.message_cpu_s * (messages + MESSAGES_BY_ITSELF)

    def _late_s(self, nbytes: float, share: float) -> float:
        """How long its messages wait for a core.

        All ranks need one at the same moment, as they run in step, so none has that of another.
        """
        return self._message_work_s(nbytes, share) * (1.0 / min(1.0, self.cores) - 1.0)

    def _cpu_bound_s(self, nbytes: float, share: float) -> float:
        return self.cpu_s(nbytes, share) / self.cores

    def _messages_s(self, nbytes: float, share: float) -> float:
        sent_s = share * self._algorithm(nbytes).messages(self.ranks) * self.latency_s
        return sent_s + self._late_s(nbytes, share)

    def _algorithm(self, nbytes: float) -> Algorithm:
        name = self.algorithm
        if name in LIBRARIES:
            name = LIBRARIES[name](self.ranks, nbytes, self.bytes_per_s, self.latency_s)
        return ALGORITHMS[name]
