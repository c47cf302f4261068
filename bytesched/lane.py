"""A lane: what carries hops, under an order rule and a credit."""

from __future__ import annotations

from bytesched.admission import Admission
from bytesched.order import ReadyQueue
from bytesched.task import CommTask

__all__ = ["Lane"]


class Lane:
    """Ready hops and those on their way, of one process group, one peer, one direction of a store.

    A hop starts as long as fewer than ``credit_bytes`` of the lane are in flight, so at most
    ``credit_bytes`` plus one hop are (ByteScheduler's rule, counted in bytes). With an
    ``admission`` more may start at such a moment, in one block.

    Args:
        queue: which of the ready hops is next.
        name: in ``repr`` and errors.
    """

    def __init__(
        self,
        queue: ReadyQueue,
        *,
        credit_bytes: int,
        admission: Admission | None = None,
        name: str = "0",
    ) -> None:
        self.name = name
        self.queue = queue
        self.admission = admission
        self.credit_bytes = _checked(credit_bytes)
        #: the core is held: nothing starts
        self.is_held = False
        self.in_flight: dict[int, CommTask] = {}
        self.in_flight_bytes = 0
        #: lanes over the same link whose hops go first: this one starts nothing while one of them
        #: has a hop that waits for its turn
        self._yields_to: tuple[Lane, ...] = ()
        #: lanes that wait for this one
        self.followers: list[Lane] = []
        #: bytes in flight and window just before the latest start
        self._last_start = (0, self.credit_bytes)

    def yield_to(self, lanes: tuple[Lane, ...]) -> None:
        """``lanes``, and no others, go first from now on."""
        for lane in self._yields_to:
            lane.followers.remove(self)
        self._yields_to = lanes
        for lane in lanes:
            lane.followers.append(self)

    def set_credit(self, credit_bytes: int) -> None:
        """A new window; bytes already in flight stay there."""
        self.credit_bytes = _checked(credit_bytes)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is ready or in flight."""
        return not self.in_flight and not len(self.queue)

    def may_start(self, task: CommTask) -> bool:
        """Whether ``task`` may start at once when it becomes ready. A hint, on any thread."""
        return self.in_flight_bytes < self.credit_bytes and self.queue.may_be_next(task)

    def start_next(self) -> list[CommTask]:
        """The hops that start now, in this order; they are in flight from here on."""
        started: list[CommTask] = []
        window_bytes = self.credit_bytes
        if self.is_held or self.in_flight_bytes >= window_bytes:
            return started
        if self._yields_to and self._must_yield():
            return started
        if self.admission is not None:
            window_bytes = max(window_bytes, self.admission.block_bytes(window_bytes))
        while self.in_flight_bytes < window_bytes:
            task = self.queue.pop()
            if task is None:
                break
            task.start()
            if self.admission is not None:
                self.admission.started(task)
            self._last_start = (self.in_flight_bytes, window_bytes)
            self.in_flight[id(task)] = task
            self.in_flight_bytes += task.nbytes
            started.append(task)
        return started

    def _must_yield(self) -> bool:
        return any(lane.queue.peek() is not None for lane in self._yields_to)

    @property
    def is_held_back(self) -> bool:
        """Whether a hop would start now, were the core not held. Where it is."""
        return self.queue.peek() is not None and self.in_flight_bytes < self.credit_bytes

    def landed(self, task: CommTask) -> bool:
        """``task`` is over, well or not; false if it was not in flight."""
        if self.in_flight.pop(id(task), None) is None:
            return False
        self.in_flight_bytes -= task.nbytes
        return True

    def validate(self) -> None:
        """Raises AssertionError unless every invariant holds."""
        flying = list(self.in_flight.values())
        assert self.in_flight_bytes == sum(task.nbytes for task in flying)
        before_bytes, window_bytes = self._last_start
        assert before_bytes < window_bytes, repr(self)
        if flying:
            assert self.in_flight_bytes <= before_bytes + flying[-1].nbytes, repr(self)
        queued = {id(task) for task in self.queue.tasks()}
        assert len(queued) == len(self.queue)
        assert not queued & self.in_flight.keys()

    def __repr__(self) -> str:
        return (
            f"<Lane {self.name}: {len(self.queue)} ready, {len(self.in_flight)} sending, "
            f"{self.in_flight_bytes / 2**20:.2f}/{self.credit_bytes / 2**20:.2f} MiB credit>"
        )


def _checked(credit_bytes: int) -> int:
    if credit_bytes < 1:
        raise ValueError(f"credit must be at least 1 byte, got {credit_bytes}")
    return credit_bytes
