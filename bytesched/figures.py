"""The figures of `stats()`: their names, types and meanings."""

from __future__ import annotations

from typing import TypedDict


class Figures(TypedDict):
    """What every plugin reports so far; shares, and times, which are means per iteration.

    An iteration is a round of gradients that is summed over the ranks and then stepped, by however
    many optimizers. Shares and means leave out the warm-up, and start anew when gradients go in two
    halves, or the plan was left for a while. Beside these, ``wait_ms/<module>`` names the eight
    modules that training waited for longest, for gradients and updates together.
    """

    iterations: int
    """Rounds that shares and means cover; 0: training ended before the first of them."""
    steps: int
    """Calls of `step()` after the warm-up, of all optimizers."""
    barrier_crossed_steps: int
    """How many of these returned while gradients were still in flight."""
    barrier_crossed_pct: float
    """Share of all bytes that arrived after `step()` had returned."""
    reason: str
    """Why less than half of all bytes crossed the barrier; empty if more crossed."""
    exposed_comm_ms: float
    """Time in which the training thread waited while at least one chunk was in flight."""
    comm_ms: float
    """Time in which at least one chunk was in flight, also while it waited for a late rank."""
    overlap_pct: float
    """Share of `comm_ms` in which the training thread did not wait."""
    bytes_per_step: int
    """Bytes of all gradients; of a model in DDP as they are sent."""
    chunks: int
    """Number of chunks in which gradients are sent."""
    partition_bytes: int
    """Chunk size in use, given or chosen."""
    credit_bytes: int
    """Credit in use, given or chosen."""
    update_ms: float
    """Time in which parameters were updated."""
    model: str
    """Class of the model."""
    mode: str
    """`cross`, `backward` (scheduled inside backward, stepped whole) or `plain`."""
    order: str
    """`planned`, `halves` where gradients go in two, `owners` with `shard=True`; over a store
    `each worker's own`."""
    levels: int
    """2 if ranks of one host sum among themselves first, else 1."""
    world_size: int
    """Number of ranks."""
    rank: int
    """This rank."""
    urgent_sections: int
    """Urgent sections of this process that have begun (`bytesched.urgent`)."""
    urgent_s: float
    """Seconds in urgent sections that are over, each by itself."""
    held_s: float
    """Seconds in which a chunk did not start for an urgent section, of all wrapped objects."""
    urgent_released: int
    """Urgent sections that let everything go at their limit of time."""
    turns: int
    """Turns of this process on devices that it shares with other jobs (`share`)."""
    turn_wait_s: float
    """Seconds in which it waited for these."""
    turns_ended: int
    """How many of them came to their limit of time."""
