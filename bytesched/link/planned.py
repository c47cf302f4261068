"""An order that all ranks keep to, planned of what all have measured.

A plan is made of what is ready on the slowest rank: each rank measures when its tasks become ready
and how fast the link carries them, and of the largest numbers of all comes the order in which a
rank would start them if all were alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from bytesched.ahead import ChunkTimes, Link, plan_order
from bytesched.course import MEASURED_ROUNDS
from bytesched.errors import InvalidTransition

__all__ = ["Measured", "planned_order"]


class Measured:
    """What one rank measures in the last `course.MEASURED_ROUNDS` rounds."""

    def __init__(self) -> None:
        self._ready_ns: deque[list[int]] = deque(maxlen=MEASURED_ROUNDS)
        self._bytes_per_s: deque[int] = deque(maxlen=MEASURED_ROUNDS)

    def round_ends(self, ready_ns: Sequence[int], *, nbytes: int, busy_ns: int) -> None:
        """Every task of a round is over.

        Args:
            ready_ns: when each task has become ready, after any one moment.
            nbytes: of all of them.
            busy_ns: how long at least one was under way.
        """
        first_ns = min(ready_ns)
        self._ready_ns.append([at_ns - first_ns for at_ns in ready_ns])
        # As 64-bit numbers travel.
        self._bytes_per_s.append(min(nbytes * 10**9 // max(busy_ns, 1), 2**62))

    def numbers(self) -> list[int]:
        """What `planned_order` needs of each rank, always as many.

        The rate of each round, which is that of the link on the rank that was last to start most
        tasks, and too low on the others; and of each task, its median time.

        Raises InvalidTransition if too few rounds have ended.
        """
        if len(self._ready_ns) < MEASURED_ROUNDS:
            raise InvalidTransition(f"{self!r}: {MEASURED_ROUNDS} rounds make a median")
        columns = zip(*self._ready_ns, strict=True)
        return [*self._bytes_per_s, *(_median(column) for column in columns)]

    def __repr__(self) -> str:
        return f"<Measured {len(self._ready_ns)} rounds, {list(self._bytes_per_s)} bytes/s>"


def planned_order(
    nbytes: Sequence[int], numbers: Sequence[int], *, policy: str, credit_bytes: int
) -> list[int]:
    """The indices of tasks in the order in which they start if all ranks are alike.

    Args:
        nbytes: of each task of a round, as the forward pass needs them.
        numbers: the largest of all ranks, of each that `Measured.numbers` returns.
        policy: one of `bytesched.policy.policy_names`.
    """
    bytes_per_s = max(1, _median(numbers[:MEASURED_ROUNDS]))
    chunks = [
        ChunkTimes(n, ready_ns / 1e9, index)
        for index, (n, ready_ns) in enumerate(zip(nbytes, numbers[MEASURED_ROUNDS:], strict=True))
    ]
    return plan_order(chunks, Link(1 / bytes_per_s, 0.0), policy=policy, credit_bytes=credit_bytes)


def _median(numbers: Sequence[int]) -> int:
    return sorted(numbers)[len(numbers) // 2]
