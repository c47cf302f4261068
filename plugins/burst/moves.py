"""Moves: the samples of a batch from the ranks that have them to the ranks that need them.

A move's sends and receives are posted together and have a tag of their own, so that the ranks need
not agree on an order.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor

from bytesched.burst.cost import Place
from bytesched.observe import Observers

from ..failures import Progress
from ..routes.group import Group
from ..routes.messages import Messages, Waiter


def samples_at(place: Place, device: int, batch: int) -> range:
    """The samples of a batch that a device has; none if it is elsewhere."""
    if device not in place.devices:
        return range(0)
    return range(device - place.first, batch, place.width)


@dataclass(eq=False)
class Move:
    """One way of samples, on one rank: what it sends to which rank, and gets from which."""

    name: str
    #: on all ranks; also the tag of its messages
    index: int
    #: rank -> positions in what this rank has, in the order of samples
    sends: dict[int, Tensor]
    #: rank -> positions in what this rank will have
    receives: dict[int, Tensor]
    #: positions before and after of the samples that stay
    stays: tuple[Tensor, Tensor]
    #: samples that this rank will have
    samples: int
    #: its messages are under way
    busy: bool = False

    @classmethod
    def between(
        cls, source: Place, target: Place, batch: int, rank: int, name: str, index: int
    ) -> Move:
        """What `rank` does to bring a batch from one place to another."""
        before = {s: i for i, s in enumerate(samples_at(source, rank, batch))}
        after = {s: i for i, s in enumerate(samples_at(target, rank, batch))}
        sends: dict[int, list[int]] = {}
        receives: dict[int, list[int]] = {}
        stay: list[tuple[int, int]] = []
        for sample in range(batch):
            here = source.first + sample % source.width
            there = target.first + sample % target.width
            if here == there == rank:
                stay.append((before[sample], after[sample]))
            elif here == rank:
                sends.setdefault(there, []).append(before[sample])
            elif there == rank:
                receives.setdefault(here, []).append(after[sample])
        return cls(
            name,
            index,
            {peer: torch.tensor(places) for peer, places in sends.items()},
            {peer: torch.tensor(places) for peer, places in receives.items()},
            (torch.tensor([a for a, _ in stay]), torch.tensor([b for _, b in stay])),
            len(after),
        )

    def nbytes(self, sample_bytes: int) -> int:
        """Bytes that this rank sends and receives."""
        places = [*self.sends.values(), *self.receives.values()]
        return sample_bytes * sum(len(positions) for positions in places)


class Moves:
    """All moves of this rank, on a group of their own."""

    def __init__(self, group: Group, observers: Observers) -> None:
        self._group = group
        self._observers = observers
        self._messages = Messages(group)
        self.progress = Progress(group)
        self.progress.look = self._messages.lost
        #: that have begun
        self._moves: set[Move] = set()
        self._lane = Waiter(self._messages, "bytesched-moves", self.progress.fail)
        #: around the wait for a move; the name is the move's
        self.idle: Callable[[str], AbstractContextManager[object]] = lambda name: nullcontext()
        #: totals
        self.bytes = 0
        self.wait_ns = 0

    # -- the training thread -----------------------------------------------------------

    def run(self, move: Move, x: Tensor) -> Tensor:
        """What this rank has after the move; it waits only for what it gets itself."""
        self.progress.check()
        shape = x.shape[1:]
        sample_bytes = x.element_size() * max(1, shape.numel())
        moved = x.new_empty((move.samples, *shape))
        before, after = move.stays
        if len(before):
            moved[after] = x[before]
        if not move.sends and not move.receives:
            return moved
        # What it sent last time has long been read, but must have been.
        self._wait_for(move)
        nbytes = move.nbytes(sample_bytes)
        incoming = {
            peer: x.new_empty((len(positions), *shape)) for peer, positions in move.receives.items()
        }
        self.bytes += nbytes
        self._start(move, incoming, {peer: x[at] for peer, at in move.sends.items()}, nbytes)
        if move.receives:
            began_ns = perf_counter_ns()
            with self.idle(move.name):
                self._wait_for(move)
            ended_ns = perf_counter_ns()
            self.wait_ns += ended_ns - began_ns
            if self._observers:
                self._observers.on_span("wait", move.name, began_ns, ended_ns)
            for peer, positions in move.receives.items():
                moved[positions] = incoming[peer]
        return moved

    def finish(self) -> None:
        """Returns when nothing is under way here."""
        for move in self._moves:
            self._wait_for(move)

    def _wait_for(self, move: Move) -> None:
        peers = ", ".join(map(str, sorted({*move.receives, *move.sends})))
        self.progress.wait(lambda: not move.busy, f"{move.name!r} with rank {peers}")

    def shut_down(self) -> None:
        """Ends the threads and the connections. Idempotent."""
        self._lane.stop()
        if self._lane.is_busy:
            self._group.abort()
        self._lane.join()
        self._group.close()

    def _start(
        self, move: Move, incoming: dict[int, Tensor], outgoing: dict[int, Tensor], nbytes: int
    ) -> None:
        """Posts what ``move`` sends and receives."""
        group, tag = self._group, move.index
        move.busy = True
        self._moves.add(move)
        began_ns = perf_counter_ns()
        try:
            works = [(group.receive(t, peer, tag), peer) for peer, t in incoming.items()]
            works += [(group.send(t, peer, tag), peer) for peer, t in outgoing.items()]
        except RuntimeError as error:
            self.progress.raise_first(group.error(error, task=move.name))
        self._lane.put(move.name, works, partial(self._ended, move, nbytes, began_ns))

    def _ended(self, move: Move, nbytes: int, began_ns: int) -> None:
        """The messages of ``move`` have come. The thread of the lane."""
        if self._observers:
            args = {"bytes": nbytes, "chunk": move.index}
            self._observers.on_span("send", move.name, began_ns, perf_counter_ns(), args)
        with self.progress.lock:
            move.busy = False
            self.progress.notify()


class _Moved(torch.autograd.Function):
    """A move, and in backward the way back.

    A rank's gradients are those of the mean over its *own* samples, as in data parallelism; among
    more ranks that mean is over fewer samples, so that gradients are scaled on their way.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, moves: Moves, there: Move, back: Move, scale: float
    ) -> Tensor:
        ctx.moves, ctx.back, ctx.scale = moves, back, scale
        return moves.run(there, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        found = ctx.moves.run(ctx.back, grad.contiguous())
        return (found if ctx.scale == 1 else found * ctx.scale), None, None, None, None, None


def move(x: Tensor, anchor: Tensor, moves: Moves, there: Move, back: Move, scale: float) -> Tensor:
    """`x` after a move. Differentiable on every rank, also where there is nothing before it.

    `anchor` is any tensor that requires a gradient: without one, a rank that has no sample yet
    would be missing when gradients move back.
    """
    moved: Tensor = _Moved.apply(x, anchor, moves, there, back, scale)  # type: ignore[no-untyped-call]
    return moved
