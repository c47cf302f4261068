"""What every rank of a simulated cluster does in an iteration: it computes, sends and updates."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from bytesched.task import CommTask

__all__ = ["Bundle", "Gather", "Job", "Work"]


@dataclass(frozen=True, slots=True)
class Job:
    """One collective of the backward pass."""

    nbytes: int
    #: lower goes first
    priority: int
    #: the layer whose gradient it waits for last: the first one in forward order; -1: none
    layer: int
    #: of an all-reduce: 1/2 for a reduce-scatter or an all-gather
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Bundle:
    """What is updated when these jobs have arrived."""

    jobs: tuple[int, ...]
    update_s: float


@dataclass(frozen=True, slots=True)
class Gather:
    """One collective of the forward pass; these go in their order, after all updates."""

    nbytes: int
    #: the first layer that waits for it
    layer: int
    #: the layer at whose beginning it is issued; -1: when all is updated
    issued_at: int
    share: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """An iteration, the same on all ranks: layers are in the order of the forward pass."""

    name: str
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    jobs: tuple[Job, ...]
    bundles: tuple[Bundle, ...]
    #: the bundle that each layer waits for; -1: none
    bundle_of: tuple[int, ...]
    gathers: tuple[Gather, ...] = ()
    #: how jobs are ordered: as planned of what ranks measure, or in the order they are listed
    is_planned: bool = False
    policy: str = "priority"
    credit_bytes: int = 1 << 62

    @property
    def releases_s(self) -> tuple[float, ...]:
        """From the start of backward until each layer's gradient is computed."""
        return tuple(accumulate(reversed(self.backward_s)))[::-1]

    @property
    def nbytes(self) -> float:
        """Bytes sent, counted as those of all-reduces."""
        sent: list[Job | Gather] = [*self.jobs, *self.gathers]
        return sum(one.share * one.nbytes for one in sent)

    def tasks(self) -> list[CommTask]:
        """New tasks for a scheduler, one for each job."""
        tasks = []
        for index, job in enumerate(self.jobs):
            task = CommTask(
                f"job{index}", start_at=0, stop_at=job.nbytes, itemsize=1, priority=job.priority
            )
            task.index = index
            tasks.append(task)
        return tasks
