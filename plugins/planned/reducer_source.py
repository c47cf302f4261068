"""DDP's reducer as the source of chunks: its communication hook, and what has to be around it.

The reducer decides what is reduced, when a gradient is complete, and what a round is. Its hook
returns a future that is complete at once, so backward waits for nothing; after its finalize, the
gradients that everyone sees wait for their sums (proxies.pending_grads).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any, ClassVar, Final

import torch
from torch import nn
from torch.autograd import Variable

from ..proxies.passes import is_inside_another
from ..proxies.pending_grads import PendingGrad
from .buckets import Bucket, Member
from .cutting import Cutter
from .source import Listener, Phase, Source

__all__ = ["ReducerSource"]

#: why sums land inside backward
_ELSEWHERE: Final = "gradients lie in memory that others have, too"
_STRIDES: Final = "DDP copies gradients out of its buckets: parameters have got other strides"
_ADDED_TO: Final = "a reentrant checkpoint ends the round, and others add to its gradients"


class ReducerSource(Source):
    """The communication hook of one reducer. It keeps no DDP alive: the reducer keeps the hook.

    Args:
        divisor: of what is handed out: the number of ranks, or 1 where what sends it divides.
        names: of parameters, by their ids.
        holds_gradients: DDP's ``gradient_as_bucket_view``.
        is_static: DDP's ``static_graph``.
        is_batched: DDP's ``batched_grad_copy``.
        may_be_unused: parameters may stay out of a round.
        cut: see `Bucket`.
        future: makes one.
        is_manual: whether the script calls DDP's ``finalize_backward`` at the moment.
        keep_local: from now on the reducer writes no sums into gradients; whether it can do that.
    """

    #: rounds that DDP makes by itself
    early_rounds: ClassVar[int] = 2

    def __init__(
        self,
        listener: Listener,
        divisor: int,
        names: Mapping[int, str],
        *,
        holds_gradients: bool,
        is_static: bool,
        is_batched: bool,
        may_be_unused: bool,
        cut: Cutter,
        future: Callable[[], torch.futures.Future[torch.Tensor]],
        is_manual: Callable[[], bool],
        keep_local: Callable[[], bool],
    ) -> None:
        super().__init__(listener, cut, holds_gradients=holds_gradients)
        self._divisor = divisor
        self._names = names
        self._is_static = is_static
        self._is_batched = is_batched
        #: whether DDP may leave a gradient alone, which shows by its version
        self._may_be_left = (may_be_unused or is_static) and not holds_gradients
        self._future = future
        self._is_manual = is_manual
        self._keep_local = keep_local
        #: a round that the script is to finalize
        self._unfinalized: list[Bucket] = []
        #: the script is about to finalize a backward pass that was finalized when it wrapped
        self.is_finalized_ahead = False
        self._is_unfinalized_early = False
        #: parameters whose gradients lay in buckets before this backward pass; see `_divide`
        self._in_buckets: set[int] = set()
        #: gradients of a round that ended inside of another pass, and their versions then
        self._ended_inside: list[tuple[Member, int]] = []
        #: what that pass does later is added to gradients
        self._are_added_to = False

    def __call__(self, state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        number, buffer = bucket.index(), bucket.buffer()
        is_backward = torch._C._current_graph_task_id() != -1
        self.handed_out += 1
        if number == 0:
            self.is_finalized_ahead = False
            self.phase = Phase.OPEN
            self._opened = []
            self._listener.round_begins()
        self._divide(buffer, bucket)
        here = self._known(number, bucket, is_answer=not is_backward)
        here.is_under_way = True
        self._opened.append(here)
        is_last = bucket.is_last()
        self._listener.ready(here.chunks, is_last=is_last)
        if is_last:
            self._complete(is_backward)
        future = self._future()
        future.set_result(buffer)
        return future

    def begin_anew(self) -> None:
        """The reducer is a new one."""
        self.rounds = 0
        self._are_local = False
        self.let_go()

    def _known(self, number: int, bucket: Any, *, is_answer: bool) -> Bucket:
        """The bucket ``number``, anew if its memory is not what it was.

        The layout is another one where parameters are, and not where memory is: so that it changes
        in the same round on all ranks.

        Args:
            is_answer: of a rank that has joined: zeros, in other memory each time.
        """
        known = self.buckets[number] if number < len(self.buckets) else None
        if known is not None and known.is_of(bucket.buffer()):
            return known
        here = self._made(bucket)
        is_alike = known is not None and known.is_like(here)
        if not is_alike:
            self.let_go(number)
            self._listener.layout_changes()
        if known is None or not is_alike:
            self.buckets.append(here)
        elif not is_answer:
            known.let_go()
            self.buckets[number] = here
        return here

    def _made(self, bucket: Any) -> Bucket:
        parameters: list[nn.Parameter] = bucket.parameters()
        return Bucket(
            self._listener,
            bucket.buffer(),
            parameters,
            bucket.gradients(),
            self._names,
            holds_gradients=self._holds_gradients,
            cut=self.cut,
            first=sum(len(other.chunks) for other in self._opened),
        )

    def _divide(self, buffer: torch.Tensor, bucket: Any) -> None:
        """As the reducer does where it has no hook.

        What it copies in one call for the whole bucket it divides there; what it copies one by one
        it multiplies, and what lies in the bucket already it divides. The same bits only where the
        number of ranks is a power of two.
        """
        if self._divisor == 1:
            return
        if self._is_batched:
            buffer.div_(self._divisor)
            return
        if not self._in_buckets:
            buffer.mul_(1 / self._divisor)
            return
        for parameter, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if id(parameter) in self._in_buckets:
                view.div_(self._divisor)
            else:
                view.mul_(1 / self._divisor)

    def backward_begins(self, parameters: Sequence[nn.Parameter]) -> None:
        """See `Source`."""
        super().backward_begins(parameters)
        # The last pass may have failed.
        self._ended_inside = []
        if not self._holds_gradients or not self._divisor & (self._divisor - 1):
            return
        storages = {bucket.buffer.untyped_storage().data_ptr() for bucket in self.buckets}
        self._in_buckets = {
            id(parameter)
            for parameter in parameters
            if (grad := parameter.grad) is not None
            and (
                grad.untyped_storage().data_ptr() in storages
                or (
                    self.rounds <= self.early_rounds
                    and grad.untyped_storage().nbytes() > grad.nbytes
                )
            )
        }

    def _complete(self, is_backward: bool) -> None:
        """The last bucket of a round was handed out, and is under way."""
        is_early = self.is_early
        self.rounds += 1
        self.finished += 1
        opened, self._opened = self._opened, []
        if not is_backward:
            # A rank that has joined answers the others, outside of backward.
            self._land(opened)
            for bucket in opened:
                if not any(bucket is kept for kept in self.buckets):
                    bucket.let_go()
            self.phase = Phase.IDLE
            return
        if is_early and self._is_static:
            # DDP may finalize at once, before any callback.
            self._land(opened)
        self.phase = Phase.COMPLETE
        if self._is_manual():
            self._unfinalized, self._is_unfinalized_early = opened, is_early
            return
        # DDP queues its finalize when this hook has returned: in between, and behind it.
        queue = Variable._execution_engine.queue_callback
        queue(lambda: self._before_finalize(opened, is_early=is_early))

    @contextmanager
    def finalizing(self) -> Iterator[None]:
        """Around a call of DDP's ``finalize_backward``."""
        buckets, self._unfinalized = self._unfinalized, []
        is_early = self._is_unfinalized_early
        is_landed = self._land_before(buckets, is_early=is_early)
        versions = self._versions(buckets) if self._may_be_left else {}
        yield
        if buckets:
            self._after_finalize(buckets, versions, is_early=is_early, is_landed=is_landed)

    def _before_finalize(self, buckets: list[Bucket], *, is_early: bool) -> None:
        is_landed = self._land_before(buckets, is_early=is_early)
        versions = self._versions(buckets) if self._may_be_left else {}
        Variable._execution_engine.queue_callback(
            lambda: self._after_finalize(buckets, versions, is_early=is_early, is_landed=is_landed)
        )

    def _after_finalize(
        self,
        buckets: list[Bucket],
        versions: Mapping[int, int],
        *,
        is_early: bool,
        is_landed: bool,
    ) -> None:
        if not is_landed:
            for bucket in buckets:
                left = self._left(bucket, versions) if versions else ()
                if not self._hand_out(bucket, left):
                    self._listener.land(bucket, _ELSEWHERE)
                elif self._are_added_to:
                    self._listener.land(bucket, _ADDED_TO)
        if is_inside_another():
            # A reentrant checkpoint had the last gradient.
            with torch._C.DisableTorchFunctionSubclass():
                self._ended_inside = [
                    (member, grad._version)
                    for bucket in buckets
                    for member in bucket.members
                    if (grad := member.parameter.grad) is not None
                ]
        self.phase = Phase.IDLE
        self._listener.round_ends(buckets, is_early=is_early)
        if is_early and not (self.is_early or self._holds_gradients or self._may_be_left):
            # What it would write has no sums yet, and whoever reads it waits and gets those.
            self._are_local = self._keep_local()

    def added_to(self) -> str:
        """What got another gradient between the end of its round and that of the pass around it.

        Called when that pass is over. DDP adds it up on each rank alone. Empty where the sum was
        there by then: so it will be in later rounds.
        """
        ended, self._ended_inside = self._ended_inside, []
        name = ""
        with torch._C.DisableTorchFunctionSubclass():
            for member, version in ended:
                grad = member.parameter.grad
                if grad is not None and grad._version != version:
                    self._are_added_to = True
                    if type(grad) is PendingGrad and grad.sum_ is member:
                        name = name or member.name
        return name

    @staticmethod
    def _left(bucket: Bucket, versions: Mapping[int, int]) -> Set[int]:
        """Parameters whose gradients DDP has not written, as no rank has used them."""
        return {
            id(member.parameter)
            for member in bucket.members
            if (grad := member.parameter.grad) is not None
            and versions.get(id(member.parameter)) == grad._version
        }

    def _are_copied(self, buckets: Sequence[Bucket]) -> bool:
        """Whether DDP copies gradients out of buckets where they cannot lie any more.

        Their parameters have other strides than when its reducer was made.
        """
        if self._holds_gradients:
            # In every round, for every tensor: without a call for each.
            for bucket in buckets:
                for member in bucket.members:
                    if member.parameter.stride() != member.view.stride():
                        return True
        return False

    def _land_before(self, buckets: Sequence[Bucket], *, is_early: bool) -> bool:
        """Lands them all before DDP finalizes, if they have to be here by then."""
        are_copied = not is_early and self._are_copied(buckets)
        if is_early or are_copied:
            self._land(buckets, _STRIDES if are_copied else "")
        return is_early or are_copied

    @staticmethod
    def _versions(buckets: Sequence[Bucket]) -> dict[int, int]:
        """Of all gradients, before DDP writes those that some rank has used."""
        return {
            id(member.parameter): member.parameter.grad._version
            for bucket in buckets
            for member in bucket.members
            if member.parameter.grad is not None
        }
