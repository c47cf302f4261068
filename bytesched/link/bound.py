"""How fast an iteration can be at best, and how far a real schedule may stay behind.

A gradient is *released* when backward has computed it, it has to cross the link, and what is
left of the next forward pass once it has arrived is its *tail*. One link, release times, tails
and preemption: Jackson's rule (serve the longest tail first) is optimal, and since the tails of
a chain of layers fall from its first layer to its last, it is "the first layer first", the
priority order of ByteScheduler (SOSP'19). The value of that schedule, on a link without any cost
per message, is T*: no system that computes the same gradients, sends the same bytes and lets
every layer see its own update can finish an iteration sooner.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gradient:
    """One gradient, or several that are released and needed together."""

    #: Seconds from the start of backward until it is computed.
    release_s: float
    #: Seconds of computation from its first use in forward to the end of forward.
    tail_s: float
    nbytes: float


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of a chain, in the order of the forward pass."""

    forward_s: float
    backward_s: float
    nbytes: float
    #: of experts: what a rank hands to the all-to-all before the layer, and to that after it
    exchange_bytes: float = 0.0


def gradients(layers: Sequence[Layer]) -> list[Gradient]:
    """The gradients of a chain of layers, with their release times and tails."""
    tails = []
    tail_s = 0.0
    for layer in reversed(layers):
        tail_s += layer.forward_s
        tails.append(tail_s)
    found = []
    release_s = 0.0
    for layer, tail_s in zip(reversed(layers), tails, strict=True):
        release_s += layer.backward_s
        found.append(Gradient(release_s, tail_s, layer.nbytes))
    return found[::-1]


def optimum_s(work: Sequence[Gradient], compute_s: float, bytes_per_s: float) -> float:
    """T*: seconds of an iteration under the preemptive optimum, from backward to backward.

    `compute_s` is a whole backward and forward pass; `bytes_per_s` counts bytes of gradient,
    so an all-reduce of n ranks has moved 2(n-1)/n times as many over each link.
    """
    _check_bandwidth(bytes_per_s)
    finish_s = compute_s
    for gradient, end_s in zip(work, _jackson(work, bytes_per_s), strict=True):
        finish_s = max(finish_s, end_s + gradient.tail_s)
    return finish_s


def _jackson(work: Sequence[Gradient], bytes_per_s: float) -> list[float]:
    """When each gradient has crossed the link, longest tail first, preemptive."""
    ends_s = [0.0] * len(work)
    arrivals = sorted(range(len(work)), key=lambda index: work[index].release_s)
    waiting: list[tuple[float, int, float]] = []
    now_s = 0.0
    next_arrival = 0
    while waiting or next_arrival < len(arrivals):
        if not waiting:
            now_s = max(now_s, work[arrivals[next_arrival]].release_s)
        while next_arrival < len(arrivals) and work[arrivals[next_arrival]].release_s <= now_s:
            index = arrivals[next_arrival]
            left_s = work[index].nbytes / bytes_per_s
            heapq.heappush(waiting, (-work[index].tail_s, index, left_s))
            next_arrival += 1
        key, index, left_s = heapq.heappop(waiting)
        end_s = now_s + left_s
        if next_arrival < len(arrivals) and work[arrivals[next_arrival]].release_s < end_s:
            now_s = work[arrivals[next_arrival]].release_s
            heapq.heappush(waiting, (key, index, end_s - now_s))
        else:
            ends_s[index] = now_s = end_s
    return ends_s


def split_optimum_s(work: Sequence[Gradient], compute_s: float, bytes_per_s: float) -> float:
    """T* of whatever clips: a norm of all gradients stands before the next forward pass.

    With whole all-reduces no forward pass may begin before the last byte has arrived. Here each is
    split.
    A reduce-scatter moves half the bytes of an all-reduce and is all that a norm needs; the
    all-gather, the other half, is needed by its own layer alone. That is two jobs for every
    gradient: the first with the tail of the first layer, as the norm stands before all of forward,
    the second with the tail of its own layer and not before the first. Where jobs precede each
    other, longest tail first is still optimal if no tail is longer than that of a job which it
    must follow (Lawler 1973); the first jobs have the longest tail there is. An all-gather needs
    no norm if gradients are gathered as they are and scaled where they arrive, so it may use a link
    that is idle during backward.
    """
    forward_s = _longest_tail_s(work)
    halves = [Gradient(one.release_s, forward_s, one.nbytes / 2) for one in work]
    halves += [Gradient(one.release_s, one.tail_s, one.nbytes / 2) for one in work]
    return optimum_s(halves, compute_s, bytes_per_s)


def sharded_optimum_s(
    work: Sequence[Gradient], compute_s: float, bytes_per_s: float, *, is_clipped: bool
) -> float:
    """As `optimum_s`, where owners update: parameters take the place of the sums of an all-gather.

    They cannot leave before ``step()`` is called, after all of backward, and with a norm of all
    gradients not before the last reduce-scatter has ended. So of the two jobs of every gradient in
    `split_optimum_s` the second is released then. Its link carries half of an all-reduce behind
    backward, whatever crossed before.
    """
    halves = [Gradient(one.release_s, one.tail_s, one.nbytes / 2) for one in work]
    step_s = max((one.release_s for one in work), default=0.0)
    if is_clipped:
        _check_bandwidth(bytes_per_s)
        step_s = max([step_s, *_jackson(halves, bytes_per_s)])
    rest = [Gradient(step_s, one.tail_s, one.nbytes / 2) for one in work]
    return optimum_s([*halves, *rest], compute_s, bytes_per_s)


def exchanging_optimum_s(
    layers: Sequence[Layer],
    bytes_per_s: float,
    exchange_bytes_per_s: float,
    *,
    latency_s: float = 0.0,
    in_pieces: bool = False,
) -> float:
    """As `optimum_s`, for a chain that waits for all-to-alls, which share the link with gradients.

    A layer of experts computes between two all-to-alls, in forward and in backward. The chain is a
    sequence of stretches: it computes, or it waits for a job of the link that it released by coming
    there (an all-to-all), or for one released in backward (a gradient, where forward comes to its
    layer). The link is one machine that can be preempted at no cost.

    Serving what the chain waits for first, then gradients by the place of their layers in forward,
    is optimal. Take any schedule, and the first moment at which it serves y, or nothing, though x
    of a higher rank is there. Exchange that service of y for as much later service of x: x ends no
    later than before, and y no later than x did. Nobody waits for y before that: the chain comes
    to the layer of y only after it had x, an all-to-all on its way or a gradient of an earlier
    layer. So no stretch begins later than before, nor is anything released later; repeating this
    leads to the order above and to no longer iteration. T* is its length.

    With `in_pieces`, all-to-alls are cut so finely that experts compute on what has come while the
    rest is on its way: a layer of experts is then one stretch, over when its compute and the bytes
    of both all-to-alls are. That drops what still joins them (the first piece precedes compute,
    compute the last one), so no number of pieces can beat it; the argument above holds as it is.

    Args:
        bytes_per_s: of gradients, as for `optimum_s`.
        exchange_bytes_per_s: handed to an all-to-all. Among n ranks (n-1)/n of them leave, half of
            what leaves in an all-reduce of as many: on the same links, twice the rate of gradients.
        latency_s: of an all-to-all, in which the link is free for gradients.
    """
    _check_bandwidth(bytes_per_s)
    _check_bandwidth(exchange_bytes_per_s)
    now_s = 0.0
    left_s = [0.0] * len(layers)

    def wait_s(layer: Layer, compute_s: float) -> tuple[float, float]:
        """How long the link is free while the chain is in a layer: until its gradient, after it."""
        nonlocal now_s
        last_s = latency_s if layer.exchange_bytes else 0.0
        sent_s = 2 * layer.exchange_bytes / exchange_bytes_per_s
        now_s += sent_s
        free_s = max(0.0, compute_s + 2 * last_s - sent_s * in_pieces)
        return free_s - min(free_s, last_s), min(free_s, last_s)

    def serve(free_s: float) -> None:
        nonlocal now_s
        now_s += free_s
        for index, needed_s in enumerate(left_s):
            served_s = min(needed_s, free_s)
            left_s[index] -= served_s
            free_s -= served_s

    for index in reversed(range(len(layers))):
        before_s, after_s = wait_s(layers[index], layers[index].backward_s)
        serve(before_s)
        left_s[index] = layers[index].nbytes / bytes_per_s
        serve(after_s)
    for index, layer in enumerate(layers):
        now_s += left_s[index]
        left_s[index] = 0.0
        serve(sum(wait_s(layer, layer.forward_s)))
    return now_s


def _longest_tail_s(work: Sequence[Gradient]) -> float:
    return max((one.tail_s for one in work), default=0.0)


def store_bytes_per_s(link_bytes_per_s: float, *, workers: int, servers: int) -> float:
    """Bytes of gradient per second and direction that every worker can push, and pull.

    A worker's link carries each of its bytes once in either direction, and that of a server those
    of all workers for its share of the keys. Without servers (0) a rank's link does both, less
    what stays on the rank.

    A push and its pull are two pipes in series; of a fluid in them, what has left the first is in
    the second at once. So with equal rates the optimum of both is that of one pipe of this rate:
    `optimum_s` with it is what no exchange through the servers can beat.
    """
    _check_bandwidth(link_bytes_per_s)
    if not servers:
        return link_bytes_per_s * workers / (2 * (workers - 1))
    return link_bytes_per_s * min(1.0, servers / workers)


def partition_seed_bytes(
    *, total_bytes: float, overhead_s: float, bytes_per_s: float, credit_partitions: float = 1.0
) -> int:
    """The partition size with the least bound of a priority schedule, credit being k partitions.

    ``T <= T* + theta N + (c + delta) / B``: each of the N chunks costs theta on the link, and an
    urgent chunk waits behind at most the credit c plus the one partition delta that overdraws it.
    So ``delta = sqrt(theta B S / (k + 1))`` with S the bytes of all gradients; at least one byte.
    """
    _check_bandwidth(bytes_per_s)
    seed = math.sqrt(overhead_s * bytes_per_s * total_bytes / (credit_partitions + 1.0))
    return max(1, round(seed))


def _check_bandwidth(bytes_per_s: float) -> None:
    if not bytes_per_s > 0:
        raise ValueError(f"bytes_per_s = {bytes_per_s}: a bandwidth is positive")
