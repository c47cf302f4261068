"""The figures of `stats()`: their names, types and meanings."""

from __future__ import annotations

from typing import TypedDict


class Figures(TypedDict):
    """What every plugin reports so far; shares, and times, which are means per iteration.

    An iteration is a round of gradients that is summed over the ranks and then stepped, by however
    many optimizers. Shares and means leave out the warm-up, and the rounds until the ranks have
    voted for the first time on whether all-reduces are split. Beside these, ``wait_ms/<module>``
    names the eight modules that training waited for longest, for gradients and updates together.
    """

    iterations: int
    """Rounds that shares and means are of; 0: training ended before one of them."""
    steps: int
    """Calls of `step()` after the warm-up, of all optimizers."""
    barrier_crossed_steps: int
    """Of these, how many returned while gradients were still on their way."""
    barrier_crossed_pct: float
    """Share of all bytes that arrived after `step()` had returned."""
    reason: str
    """Why less than half of all bytes did; empty where more did."""
    rested_rounds: int
    """Rounds that were left to DDP, as communication takes no time; no other figure is of them."""
    exposed_comm_ms: float
    """Time for which the training thread waited while something was on its way."""
    comm_ms: float
    """Time for which at least one chunk was on its way: sent, or awaited from another rank that
    is late."""
    overlap_pct: float
    """Share of `comm_ms` in which the training thread did not wait."""
    bytes_per_step: int
    """Bytes of all gradients."""
    chunks: int
    """Chunks in which they are sent."""
    partition_bytes: int
    """Size of the chunks in use, also where it was chosen."""
    credit_bytes: int
    """Most bytes in flight, also where it was chosen."""
    scheduler_cpu_us_per_chunk: float
    """CPU time of choosing what is next, and of telling the other ranks."""
    hook_us_per_parameter: float
    """Time that the backward pass spends in hooks."""
    update_ms: float
    """Time of the optimizer, in a thread of its own."""
    model: str
    """Class of the model."""
    mode: str
    """`cross`, `backward` (scheduled inside backward, stepped whole) or `plain`."""
    order: str
    """`leader` or `replay`; with Horovod `negotiated`."""
    levels: int
    """2 where ranks that share a host sum among themselves first, else 1."""
    world_size: int
    """Number of ranks."""
    rank: int
    """This rank."""
