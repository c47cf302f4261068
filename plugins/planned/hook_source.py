"""Gradients of parameters as the source of chunks: hooks of ours, and buckets of ours.

A round is one synchronised backward pass, or several that complete each other (two losses over one
forward pass). Every parameter takes part in it once: with its gradient, or with what it has from
before, or with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import Any, ClassVar, Final

import torch
from torch.autograd import Variable

from bytesched.errors import PluginError

from ..failures import Failures
from ..proxies.passes import is_inside_another
from ..update.surroundings import unseen
from .buckets import Bucket
from .bundles import Slot
from .cutting import cut_whole
from .entries import Entry, Filling, grouped
from .source import Listener, Phase, Source
from .wire import Partition, Wire

__all__ = ["HookSource"]

#: why sums land inside backward
_ELSEWHERE: Final = "gradients lie in memory that others have, too"


class HookSource(Source):
    """The hooks of one model's parameters.

    Args:
        slots: the parameters, the same on all ranks.
        bucket_bytes: after which a bucket is full, and of a chunk.
        divisor: of gradients; 1: the wire divides.
        find_unused: parameters may get no gradient; None: the first round shows it.
        is_static: one may get several in a round, as many in each.
        partitions: of parameters that some ranks sum among themselves, by id.
    """

    #: the first one shows in which order gradients come
    early_rounds: ClassVar[int] = 1
    #: what there is of each parameter
    entry_kind: ClassVar[type[Entry]] = Entry

    def __init__(
        self,
        listener: Listener,
        wire: Wire,
        failures: Failures,
        slots: Sequence[Slot],
        *,
        bucket_bytes: int,
        divisor: int,
        find_unused: bool | None,
        is_static: bool,
        partitions: Mapping[int, Partition],
    ) -> None:
        super().__init__(listener, partial(cut_whole, chunk_bytes=bucket_bytes))
        self._wire = wire
        self._failures = failures
        self._bucket_bytes = bucket_bytes
        self._scale = 1 / divisor
        self._names = {id(slot.parameter): slot.name for slot in slots}
        self._find_unused = find_unused
        #: until the first round is over: gradients of a parameter are only counted
        self._counts_uses = is_static
        #: what no hook has written is written by its bucket
        self._are_local = True
        #: whether gradients of the next backward pass are reduced
        self.is_synced = True
        #: whether they are anyone else's
        self.is_off = False
        self.entries: list[Entry] = []
        self._cells = 0
        for index, slot in enumerate(slots):
            partition = partitions.get(id(slot.parameter))
            cell = self._cells + (0 if partition is None else partition.place)
            self._cells += 1 if partition is None else partition.groups
            self.entries.append(self.entry_kind(index, slot, partition, cell))
        self._by_id = {id(entry.slot.parameter): entry for entry in self.entries}
        self._is_callback_queued = False
        #: a pass inside another one has ended, and has not ended the round
        self._is_left_to_outer = False
        #: parameters without a gradient in this round
        self._missing = 0
        #: an exception has ended a backward pass before anything of it was handed out
        self.is_cut_short = False
        #: those that got one, in that order, and how many of them before this backward pass
        self._arrived: list[Entry] = []
        self._arrived_before = 0
        #: how often each had got one by then, if a round was open
        self._fired_before: list[int] = []
        #: what carries the map of used parameters, if nobody has waited for it
        self._telling: Any = None
        self._fillings: list[Filling] = []
        #: the first one that was not handed out
        self._next = 0
        self._lay_out(self._registered_last_first())

    def hook(self) -> Callable[[], None]:
        """Takes part in every gradient; returns what ends that."""
        handles = []
        for entry in self.entries:
            parameter = entry.slot.parameter
            handle = parameter.register_post_accumulate_grad_hook(partial(self._on_grad, entry))
            entry.hook_id = handle.id
            handles.append(handle)

        def unhook() -> None:
            for handle in handles:
                handle.remove()

        return unhook

    # -- buckets -----------------------------------------------------------------------

    def resize(self, bucket_bytes: int) -> None:
        """Buckets are others from the next round on; nothing is under way."""
        self.cut = partial(cut_whole, chunk_bytes=bucket_bytes)
        self._bucket_bytes = bucket_bytes
        self._lay_out(self._order)

    def begin_anew(self) -> None:
        """The next round is the first one again; none is open."""
        self.rounds = 0
        self._lay_out(self._registered_last_first())
        self._listener.layout_changes()

    def _registered_last_first(self) -> Sequence[int]:
        """What is registered last is used last, and gets its gradient first."""
        return range(len(self.entries) - 1, -1, -1)

    def _lay_out(self, order: Sequence[int]) -> None:
        """Buckets of parameters that are neighbours in ``order``, in the order of their last."""
        self._order = order
        self.let_go()
        first = 0
        for entries in grouped(self.entries, order, self._bucket_bytes):
            self._add_bucket(entries, first)
            first += len(self.buckets[-1].chunks)

    def let_go(self, first: int = 0) -> None:
        if self._telling is not None:
            # Others may wait for it, for which this rank has to stay.
            self._wire.wait_left([self._telling])
            self._telling = None
        super().let_go(first)
        if not first:
            # Before there are others: their memory goes now.
            self._fillings.clear()
            for entry in self.entries:
                entry.let_go()

    def _add_bucket(self, entries: Sequence[Entry], first_chunk: int) -> None:
        parameters = [entry.slot.parameter for entry in entries]
        first = parameters[0]
        sizes = [entry.numel for entry in entries]
        buffer = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
        memory = buffer.split(sizes)
        bucket = Bucket(
            self._listener,
            buffer,
            parameters,
            memory,
            self._names,
            holds_gradients=False,
            cut=self.cut,
            first=first_chunk,
        )
        if (partition := entries[0].partition) is not None:
            for chunk in bucket.chunks:
                chunk.wire = partition.wire
        filling = Filling(bucket, entries)
        for entry, member, own in zip(entries, bucket.members, memory, strict=True):
            entry.lay_out(member, own)
            entry.bucket = filling
        self.buckets.append(bucket)
        self._fillings.append(filling)

    def disown(self) -> None:
        """In a forked child: gradients are nobody else's, and nobody waits for what it tells."""
        self.is_off, self._telling = True, None

    # -- a gradient --------------------------------------------------------------------

    def _on_grad(self, entry: Entry, parameter: torch.Tensor) -> None:
        if self.is_off:
            return
        if not self.is_synced:
            entry.is_local = True
            return
        if not self._is_callback_queued:
            self._is_callback_queued = True
            Variable._execution_engine.queue_callback(self._after_backward)
        self._take(entry)

    def gradient(self, parameter: torch.Tensor) -> None:
        """``parameter`` has its gradient, and no backward pass runs: `finish` ends the round."""
        self._take(self._by_id[id(parameter)])

    def backward_gradient(self, parameter: torch.Tensor) -> None:
        """The same inside backward, the end of which ends the round."""
        self._on_grad(self._by_id[id(parameter)], parameter)

    def _take(self, entry: Entry) -> None:
        """On the critical path of every parameter's backward: few calls."""
        if self.phase is not Phase.OPEN:
            self._begin()
        entry.fired += 1
        if entry.fired != entry.expected:
            if entry.fired > entry.expected and not self._counts_uses:
                self._refuse_second(entry)
            return
        self._missing -= 1
        self._arrived.append(entry)
        filling = entry.bucket
        filling.missing -= 1
        if self._wire.has_streams:
            filling.streams = {*filling.streams, torch.cuda.current_stream()}
        if not filling.missing and self.rounds >= self.early_rounds:
            # In the first round hooks of the script may still follow ours, and change gradients.
            self._hand_over()

    def _refuse_second(self, entry: Entry) -> None:
        error = PluginError(
            f"parameter {entry.slot.name!r} got a second gradient in one round on rank "
            f"{self._wire.rank}. Either it is used in several reentrant checkpoints, or "
            "backward() ran twice on one graph, or an earlier backward() was interrupted by an "
            "exception"
        )
        # Other ranks wait for a round that this one cannot complete.
        self._failures.fail(error, is_raised=True)
        raise error

    def _begin(self) -> None:
        self.phase = Phase.OPEN
        self._opened = []
        self._next = self._arrived_before = 0
        self._missing = len(self.entries)
        self._arrived.clear()
        for entry in self.entries:
            entry.fired = 0
        for filling in self._fillings:
            filling.missing = len(filling.entries)

    def _hand_over(self) -> None:
        """Buckets go in one order on all ranks: what is full waits for those before it."""
        while self._next < len(self._fillings) and not self._fillings[self._next].missing:
            filling = self._fillings[self._next]
            if self._next == 0:
                self._listener.round_begins()
            self._next += 1
            self._fill(filling)
            self.handed_out += 1
            filling.bucket.is_under_way = True
            self._opened.append(filling.bucket)
            is_last = self._next == len(self._fillings)
            self._listener.ready(filling.bucket.chunks, is_last=is_last)

    def _fill(self, filling: Filling) -> None:
        """Puts into the bucket what is sent, divided."""
        if filling.streams:
            stream = torch.cuda.current_stream()
            for other in filling.streams - {stream}:
                stream.wait_stream(other)
            filling.streams = set()
        with torch.no_grad(), unseen(), torch._C.DisableTorchFunctionSubclass():
            for entry in filling.entries:
                if not entry.fill(self._scale):
                    self._refuse(entry)

    def _refuse(self, entry: Entry) -> None:
        """Plain training would go on without reducing, and its ranks drift apart."""
        grad = entry.slot.parameter.grad
        assert grad is not None
        kind = f"sparse {grad.dtype}" if grad.is_sparse else str(grad.dtype)
        error = PluginError(
            f"the gradient of {entry.slot.name!r} is {kind} on {grad.device}, it was "
            f"{entry.view.dtype} on {entry.view.device}: unwrap before the model is converted, and "
            "wrap it again"
        )
        self._failures.fail(error, is_raised=True)
        raise error

    # -- the end of a round ------------------------------------------------------------

    def pass_begins(self) -> None:
        """A backward pass begins, of this model or another."""
        self._is_callback_queued = False
        self._arrived_before = len(self._arrived)
        self._fired_before = [entry.fired for entry in self.entries] if self._missing else []
        self._be_last()

    def pass_failed(self) -> None:
        """An exception has ended it, and nothing of it was handed out: as if it had not been."""
        self._is_callback_queued = False
        mine = self._arrived[self._arrived_before :]
        self.is_cut_short = self.is_cut_short or bool(mine)
        for entry in mine:
            entry.bucket.missing += 1
            self._missing += 1
        del self._arrived[self._arrived_before :]
        if not self._arrived:
            self.phase = Phase.IDLE
        for entry, fired in zip(self.entries, self._fired_before, strict=False):
            entry.fired = fired

    @property
    def absent(self) -> list[str]:
        """The names of parameters that the open round lacks."""
        if self.phase is not Phase.OPEN:
            return []
        return [entry.slot.name for entry in self.entries if entry.fired < entry.expected]

    @property
    def _may_be_absent(self) -> bool:
        return self._find_unused is not False if self.is_early else bool(self._find_unused)

    def _after_backward(self) -> None:
        self._is_callback_queued = False
        if self.phase is not Phase.OPEN:
            return
        if self._missing and not self._may_be_absent:
            # The pass of another loss may bring the rest.
            return
        if self._missing and is_inside_another():
            # So may the pass around this one, which need not call us.
            self._is_left_to_outer = True
            return
        self._finish()

    def outer_ends(self) -> None:
        """A backward pass is over that is not inside of another one."""
        if self._is_left_to_outer:
            self.finish()

    def finish(self) -> None:
        """Ends the open round, where it need not be complete; see `absent`."""
        if self.phase is Phase.OPEN and (not self._missing or self._may_be_absent):
            self._finish()

    def complete(self) -> None:
        """Ends a round outside of backward: what got no gradient takes part with what it has.

        That is an earlier gradient, or zeros. Without an open round, a new one is made of these.
        """
        if self.phase is not Phase.OPEN:
            self._begin()
        for entry in self.entries:
            if entry.fired < entry.expected:
                if entry.slot.parameter.grad is None:
                    entry.slot.parameter.grad = torch.zeros_like(entry.slot.parameter)
                entry.fired = entry.expected - 1
                self._take(entry)
        self._finish()

    def _finish(self) -> None:
        self._is_left_to_outer = False
        is_early = self.is_early
        absent = [entry for entry in self.entries if entry.fired < entry.expected]
        for entry in absent:
            entry.bucket.missing -= 1
        self._missing = 0
        self._hand_over()
        telling = self._tell(absent) if is_early or self._find_unused else None
        self.phase = Phase.COMPLETE
        self.is_cut_short = False
        self.rounds += 1
        self.finished += 1
        opened, self._opened = self._opened, []
        left: Set[int] = set()
        order: Sequence[int] = ()
        if telling is not None and (is_early or absent):
            left, order = self._told(telling, absent)
        for bucket in opened:
            if not self._hand_out(bucket, left) or is_early:
                self._listener.land(bucket, "" if is_early else _ELSEWHERE)
        for entry in self.entries:
            entry.is_local = False
        self.phase = Phase.IDLE
        self._listener.round_ends(opened, is_early=is_early)
        if order:
            self._settle(order)

    def _tell(self, absent: Sequence[Entry]) -> tuple[torch.Tensor, Any]:
        """What ranks have used; and in the first round, in which order it came."""
        used = [0.0] * self._cells
        for entry in self.entries:
            used[entry.cell] = 1.0
        for entry in absent:
            used[entry.cell] = float(entry.is_local)
        places: list[float] = []
        if self.is_early:
            places = [float(len(self.entries))] * len(self.entries)
            for place, entry in enumerate(self._arrived):
                places[entry.index] = float(place)
        numbers = torch.tensor([*used, *places, len(absent)], dtype=torch.float64, device="cpu")
        self._telling = self._wire.start_largest(numbers)
        return numbers, self._telling

    def _told(
        self, telling: tuple[torch.Tensor, Any], absent: Sequence[Entry]
    ) -> tuple[Set[int], Sequence[int]]:
        """Parameters that no rank of theirs has used, by id; and the order of arrival, if told."""
        numbers, work = telling
        try:
            self._wire.wait(work, "the map of used parameters")
        except Exception as error:  # noqa: BLE001 - it is raised, here and elsewhere
            self._failures.raise_first(error)
        self._telling = None
        told = numbers.tolist()
        left = {id(entry.slot.parameter) for entry in absent if not told[entry.cell]}
        places = told[self._cells : -1]
        if places and self._find_unused is None:
            self._find_unused = told[-1] > 0
        return left, sorted(range(len(places)), key=places.__getitem__)

    def _settle(self, order: Sequence[int]) -> None:
        """Buckets are what they stay."""
        self._lay_out(order)
        self._listener.layout_changes()
        if self._counts_uses:
            for entry in self.entries:
                entry.expected = max(1, entry.fired)
        self._counts_uses = False

    def _be_last(self) -> None:
        """The script's own hooks, which may change gradients, come before ours."""
        for entry in self.entries:
            if (hook_id := entry.hook_id) != -1:
                hooks: Any = entry.slot.parameter._post_accumulate_grad_hooks
                if next(reversed(hooks)) != hook_id:
                    # Autograd reads the dictionary below OrderedDict: move_to_end would not do.
                    hooks[hook_id] = hooks.pop(hook_id)
