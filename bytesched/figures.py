"""The figures of `stats()`: their names, types and meanings."""

from __future__ import annotations

from typing import TypedDict


class Figures(TypedDict):
    """What every plugin reports, of the steps so far; times are means per step.

    Beside these, ``wait_ms/<module>`` names the eight modules that training waited for longest.
    """

    steps: int
    """Calls of `step()`."""
    barrier_crossed_steps: int
    """Of these, how many returned while gradients were still on their way."""
    barrier_crossed_pct: float
    """Share of all bytes that arrived after `step()` had returned."""
    reason: str
    """Why less than half of all bytes did; empty where more did."""
    exposed_comm_ms: float
    """Time for which the training thread waited for communication."""
    comm_ms: float
    """Time for which something was on the link."""
    overlap_pct: float
    """Share of `comm_ms` that cost the training thread nothing."""
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
