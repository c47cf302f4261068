"""The leader's word in virtual time: who sends it on to whom, and what that costs."""

from __future__ import annotations

from dataclasses import dataclass

from bytesched.tree import WORD_TASKS, children

__all__ = ["WORD_BYTES", "Control", "Weather"]

#: one message of the leader: the number of tasks that it names, and their indices
WORD_BYTES = 8 * (1 + WORD_TASKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """How ranks learn the order that rank 0 has chosen.

    Ranks are a tree: each sends a word that it gets to ``fanout`` others, one after the other.
    """

    #: ranks - 1: rank 0 sends to all; 0: words need no message, and no time
    fanout: int
    #: CPU time of one send
    send_s: float
    #: on the way, and until it is read
    latency_s: float
    #: whether an order that has converged is replayed by all
    replay: bool = False
    #: whether rank 0 chooses among what is ready on all ranks: more than any protocol can know
    foresight: bool = False

    def children(self, rank: int, ranks: int) -> range:
        """The ranks to which ``rank`` sends what it gets."""
        if not self.fanout:
            return range(0)
        return children(rank, ranks, self.fanout)


@dataclass(frozen=True, slots=True)
class Weather:
    """What differs from one iteration to the next."""

    #: how many times as long each rank computes
    pace: tuple[float, ...]
    #: how many times as long the links take
    links: float = 1.0
