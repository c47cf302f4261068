"""A model whose gradients are folded into moments, which are planned in their place."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from bytesched.config import Config
from bytesched.observe import Observers
from bytesched.tunable import Setting

from ..dependency.failures import Failures
from ..figures.meter import Meter
from ..planned.buckets import Bucket, Member
from ..planned.bundles import Slot
from ..planned.entries import Entry
from ..planned.hook_source import HookSource
from ..planned.hooked_session import HookedSession
from ..planned.sending import Sending
from ..planned.wire import Wire
from .folding import Accumulation, Folding
from .slots import MomentSlot
from .updates import MomentUpdates


class MomentEntry(Entry):
    """One parameter, whose moments are both halves of what it has in a bucket."""

    __slots__ = ("_member",)

    slot: MomentSlot
    _member: Member

    @property
    def numel(self) -> int:
        """See `Entry`."""
        return 2 * super().numel

    def let_go(self) -> None:
        """See `Entry`: moments stay until they are laid out anew."""

    def lay_out(self, member: Member, memory: torch.Tensor) -> None:
        """See `Entry`."""
        self._member = member
        self.slot.lay_out(memory)

    def fill(self, scale: float) -> bool:
        """See `Entry`: gradients were scaled as they were folded."""
        self.slot.awaits = self._member.chunks
        return True


class MomentSource(HookSource):
    """The moments of one model's parameters, after each mini-batch."""

    entry_kind: ClassVar[type[Entry]] = MomentEntry

    def _hand_out(self, bucket: Bucket, left: Container[int] = ()) -> bool:
        """See `Source`: what waits for sums is ``step()`` alone."""
        for member in bucket.members:
            entry = self._by_id[id(member.parameter)]
            assert isinstance(entry, MomentEntry)
            entry.slot.release()
        return True


class FoldedSession(HookedSession):
    """The life of one wrapped model, of which the last backward pass of a mini-batch is a round."""

    source_kind = MomentSource

    def __init__(
        self,
        root: nn.Module,
        slots: Sequence[MomentSlot],
        config: Config,
        wire: Wire,
        observers: Observers,
        *,
        accumulation: Accumulation,
        setting: Setting,
    ) -> None:
        self._moments = slots
        #: those whose gradient is refused, but not while a backward pass runs
        self._withheld: list[MomentSlot] = []

        def open_updates(
            slots: Sequence[Slot],
            sending: Sending,
            failures: Failures,
            meter: Meter,
            observers: Observers,
            **named: Any,
        ) -> tuple[None, MomentUpdates]:
            self._folding = Folding(
                accumulation, self._moments, failures, rank=wire.rank, ranks=wire.size
            )
            return None, MomentUpdates(slots, self._folding, sending, failures, meter, **named)

        super().__init__(
            root,
            slots,
            config,
            wire,
            observers,
            setting=setting,
            # Of moments, where gradients are folded.
            divisor=1,
            sync=lambda: self._folding.is_last(),
            find_unused=False,
            open_updates=open_updates,
        )

    def _hook(self, root: nn.Module) -> None:
        self._undo.append(self._folding.close)
        # Before those of the source, which send what was folded.
        self._folding.hook()
        super()._hook(root)

    def add_optimizer(
        self, optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer], *, cross: bool
    ) -> None:
        """See `PlannedSession`."""
        self._folding.check(optimizer)
        super().add_optimizer(optimizer, kind, cross=cross)

    def backward_begins(self) -> None:
        """See `Watcher`."""
        # Autograd would add to what cannot be read.
        self._withheld = [slot for slot in self._moments if slot.withhold()]
        super().backward_begins()

    def backward_ends(self) -> None:
        """See `Watcher`."""
        super().backward_ends()
        self._release_again()

    def backward_failed(self, error: BaseException) -> BaseException:
        """See `Watcher`."""
        self._release_again()
        return super().backward_failed(error)

    def _release_again(self) -> None:
        """Of another model, that pass, or one too many."""
        for slot in self._withheld:
            if slot.parameter.grad is None:
                slot.release()
        self._withheld = []

    def disown(self) -> None:
        """See `PlannedSession`."""
        self._folding.close()
        super().disown()
