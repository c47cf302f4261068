"""Buckets of DDP's reducer, and the sums that are made in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final, Protocol, TypeAlias
from weakref import ref

import torch
from torch import nn

from ..layout import shaped
from ..proxies.pending_grads import PendingGrad, make_plain
from ..update.surroundings import unseen
from .cutting import Cutter
from .wire import Summing


def uses(tensor: torch.Tensor) -> int:
    """How many tensors are over the memory of ``tensor``, and the storage as an object."""
    storage: Any = tensor.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count


_LONELY: Final = torch.ones(1, device="cpu")
#: of a tensor that nothing else is over
ALONE: Final = uses(_LONELY)


#: What a script does to each element of some gradients by itself, in place.
Change: TypeAlias = Callable[[list[torch.Tensor]], None]


class Sent:
    """What one operation carries to all ranks."""

    __slots__ = ("coded", "index", "key", "landed_on", "name", "sent", "wire", "work")

    def __init__(self, index: int, sent: torch.Tensor, name: str) -> None:
        #: in the order in which they are made
        self.index = index
        self.name = name
        #: its memory
        self.sent = sent
        #: what it is a copy of, in another dtype; see `Coding`
        self.coded: Any = None
        #: what sums it over some ranks; None: what sums all others does
        self.wire: Summing | None = None
        #: at the end of which it is everywhere; None before it is issued
        self.work: Any = None
        #: what names it on a wire that needs one: the same on all ranks, once among what is under
        #: way, and always of as many numbers
        self.key = f"{index} of {sent.numel()}"
        #: the stream that has waited for it last, or the host; None: none yet
        self.landed_on: int | None = None

    def __repr__(self) -> str:
        state = "to come" if self.work is None else "under way"
        kind = type(self).__name__
        return f"<{kind} {self.index} {self.name!r}: {state if self.landed_on is None else 'here'}>"


class Chunk(Sent):
    """A part of a bucket that is summed in one operation, or in two halves."""

    __slots__ = ("bucket", "owner", "ready")

    def __init__(
        self, bucket: Bucket, index: int, sent: torch.Tensor, owner: int | None, name: str
    ) -> None:
        super().__init__(index, sent, name)
        self.bucket = bucket
        #: the rank that sums it for all; None: they sum it together
        self.owner = owner
        #: where it became ready, on a device: what issues it elsewhere waits for that
        self.ready: Any = None


class Member:
    """One parameter in a bucket; what its pending gradient waits for."""

    __slots__ = (
        "bucket",
        "changes",
        "chunks",
        "history",
        "name",
        "owner",
        "parameter",
        "pending",
        "taken",
        "view",
    )

    def __init__(
        self,
        bucket: Bucket,
        parameter: nn.Parameter,
        view: torch.Tensor,
        chunks: Sequence[Chunk],
        name: str,
    ) -> None:
        self.bucket = bucket
        self.parameter = parameter
        #: its gradient in the bucket
        self.view = view
        #: those in which it lies
        self.chunks = chunks
        self.name = name
        #: the gradient of this round, as long as it is pending and somebody refers to it
        self.pending: ref[PendingGrad] | None = None
        #: whether an update of this round has taken it
        self.taken = False
        #: who has its sum first, and measures it: one of all where they sum it together
        self.owner = 0
        #: what the script has done to it in this round, and is to be made when the sum is there
        self.changes: list[Change] = []
        #: the same as text, with what has been made
        self.history = ""

    def answer(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """See `Sum`."""
        return self.bucket.sums.answer(func, args, kwargs)

    def settle(self) -> None:
        """See `Sum`."""
        self.bucket.sums.settle(self)

    def zeroes(self) -> bool:
        """See `Sum`: what an update reads is in the bucket, unless the gradient lies there too."""
        if not self.taken or (self.bucket.holds_gradients and not self.bucket.is_with_owners):
            return False
        self._make_plain()
        return True

    def hand_out(self, grad: torch.Tensor) -> None:
        """``grad``, the gradient that everyone sees, waits for the sum from now on."""
        pending: Any = grad
        if type(grad) is torch.Tensor:
            pending.__class__ = PendingGrad
            pending.sum_ = self
        self.pending = ref(pending)
        self.taken = False
        self.changes, self.history = [], ""

    def _make_plain(self) -> None:
        """The pending gradient as an ordinary tensor, if there is one."""
        grad = None if self.pending is None else self.pending()
        self.pending = None
        if type(grad) is PendingGrad:
            make_plain(grad)


class Bucket:
    """One bucket of a layout that the reducer keeps from round to round.

    Args:
        sums: whoever lands it.
        buffer: its memory.
        views: where each parameter's gradient lies in it.
        names: of parameters, by their ids.
        holds_gradients: ``p.grad`` lies in the bucket (``gradient_as_bucket_view``).
        cut: into chunks.
        first: the index of its first chunk.
    """

    def __init__(
        self,
        sums: Sums,
        buffer: torch.Tensor,
        parameters: Sequence[nn.Parameter],
        views: Sequence[torch.Tensor],
        names: Mapping[int, str],
        *,
        holds_gradients: bool,
        cut: Cutter,
        first: int,
    ) -> None:
        self.sums = sums
        self.buffer = buffer
        self.address = buffer.data_ptr()
        self.holds_gradients = holds_gradients
        #: its sum is outstanding, or has not been handed out
        self.is_under_way = False
        #: its sums are with their owners alone, where updates are over when ``step()`` returns
        self.is_with_owners = False
        #: what carries it to them
        self.row: Any = None
        names_here = [names.get(id(parameter), "a parameter") for parameter in parameters]
        begins = [(view.data_ptr() - self.address) // buffer.element_size() for view in views]
        cuts = cut(parameters, begins, buffer)
        starts, ends = [0, *(one.end for one in cuts[:-1])], [one.end for one in cuts]
        self.chunks = [
            Chunk(self, first + i, buffer[start : one.end], one.owner, _name(names_here, i, cuts))
            for i, (start, one) in enumerate(zip(starts, cuts, strict=True))
        ]
        self.members = []
        members = zip(parameters, begins, views, names_here, strict=True)
        for parameter, begin, view, name in members:
            stop = begin + view.numel()
            inside = [
                chunk
                for chunk, start, end in zip(self.chunks, starts, ends, strict=True)
                if start < stop and end > begin
            ]
            # As the reducer has it; its own view is contiguous, whatever the parameter is.
            laid_out = shaped(buffer[begin:stop], parameter)
            member = Member(self, parameter, laid_out, inside, name)
            owners = [chunk.owner for chunk in inside if chunk.owner is not None]
            member.owner = owners[0] if owners else 0
            self.members.append(member)
        #: how many tensors are over its memory while nobody else sees it: the buffer, two views of
        #: the reducer for each parameter, of which one is its gradient's, and what is made here
        self._use_count = ALONE + 3 * len(self.members) + len(self.chunks)

    @property
    def is_awaited(self) -> bool:
        """Whether anything refers to a gradient whose sum is outstanding."""
        return any(one.pending is not None and one.pending() is not None for one in self.members)

    @property
    def is_seen(self) -> bool:
        """Whether others have tensors over its memory that are no gradients, after finalize."""
        return uses(self.buffer) > self._use_count

    def is_of(self, buffer: torch.Tensor) -> bool:
        """Whether ``buffer`` is its memory."""
        return buffer.data_ptr() == self.address and buffer.numel() == self.buffer.numel()

    def is_like(self, other: Bucket) -> bool:
        """Whether ``other`` has the same parameters in the same order."""
        return [id(member.parameter) for member in self.members] == [
            id(member.parameter) for member in other.members
        ]

    def let_go(self) -> None:
        """It is none of the layout any more: its memory goes with the last other who has it."""
        self.members.clear()
        self.chunks.clear()
        self.buffer = self.buffer.new_empty(0)
        self.row = None

    def hand_back(self) -> None:
        """Its sum is here: pending gradients become ordinary ones, with that sum."""
        kept, changed = [], []
        for member in self.members:
            if member.changes:
                changed.append(member)
            if member.pending is not None and (grad := member.pending()) is not None:
                kept.append((grad, member.view))
        if changed:
            make_changes(changed)
        if kept and not self.holds_gradients:
            grads, views = zip(*kept, strict=True)
            # Before they are ordinary ones: what ends this in between may be tried again.
            with unseen(), torch._C.DisableTorchFunctionSubclass():
                torch._foreach_copy_(grads, views)
        for grad, _ in kept:
            if type(grad) is PendingGrad:
                # As `make_plain` does, without a call for each of them.
                del grad.sum_
                grad.__class__ = torch.Tensor  # type: ignore[assignment]
        for member in self.members:
            member.pending = None
        self.is_under_way = self.is_with_owners = False

    def __repr__(self) -> str:
        state = "under way" if self.is_under_way else "at rest"
        return f"<Bucket of {len(self.members)} parameters, {len(self.chunks)} chunks: {state}>"


class Sums(Protocol):
    """Whoever lands buckets."""

    def settle(self, member: Member) -> None:
        """Returns when the sum of ``member`` is in its gradient."""

    def answer(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What ``func`` makes of pending gradients, without a wait for all; or NotImplemented."""


def make_changes(
    members: Iterable[Member], memory: Callable[[Member], torch.Tensor] = attrgetter("view")
) -> None:
    """Makes what the script has done to gradients, whose sums are here, as far as ``memory``."""
    left = [member for member in members if member.changes]
    while left:
        change = left[0].changes[0]
        now = [member for member in left if member.changes[0] is change]
        with unseen(), torch._C.DisableTorchFunctionSubclass():
            change([memory(member) for member in now])
        for member in now:
            del member.changes[0]
        left = [member for member in left if member.changes]


def _name(names: Sequence[str], number: int, cuts: Sequence[object]) -> str:
    """A chunk's: the parameters of its bucket, in the order of backward."""
    whole = names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}"
    return whole if len(cuts) == 1 else f"{whole} {number + 1}/{len(cuts)}"
