"""What a DDP has of ours while its gradients are planned; taken off it, and put on again."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import TypeAlias

from torch.nn.parallel import DistributedDataParallel

from .reducer import hook, renew
from .reducer_source import ReducerSource

log = logging.getLogger("bytesched")

#: gives a DDP something, and returns what takes it off
Give: TypeAlias = Callable[[DistributedDataParallel], Callable[[], None]]


class Attachment:
    """The hook of one DDP, buckets of our size, and what goes with them.

    The DDP is not kept alive. Every change is made on all ranks between the same two rounds, while
    nothing is under way.

    Args:
        bucket_bytes: of the reducer that it gets by `renew`; 0: its own stays.
        stand_aside: called before the script registers a hook of its own.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        source: ReducerSource,
        bucket_bytes: int,
        stand_aside: Callable[[], None],
    ) -> None:
        self._ddp = weakref.ref(ddp)
        self._source = source
        self.bucket_bytes = bucket_bytes
        #: whether there are buckets of our size to come
        self.is_renewal_due = bucket_bytes > 0
        #: that gradients have moved
        self._is_said = False
        self._give: Give = lambda ddp: _nothing
        self._take_off: Callable[[], None] = _nothing
        #: takes off all but the hook of the reducer
        self.close = hook(ddp, source, stand_aside)

    def give(self, ddp: DistributedDataParallel, give: Give) -> None:
        """``ddp`` is given this, too, now and whenever it has our hook."""
        self._give = give
        self._take_off = give(ddp)

    def take_off(self) -> None:
        """What was given beside the hook. Idempotent."""
        take_off, self._take_off = self._take_off, _nothing
        take_off()

    def renew(self) -> None:
        """The DDP gets a new reducer, with our hook and buckets of our size."""
        self.is_renewal_due = False
        if (ddp := self._ddp()) is not None:
            self._source.begin_anew()
            self._renew(ddp, self.bucket_bytes, self._source)

    def leave(self) -> None:
        """The DDP gets a reducer as it was made with, without our hook."""
        self.take_off()
        if (ddp := self._ddp()) is not None:
            self._renew(ddp, 0)

    def _renew(
        self, ddp: DistributedDataParallel, bucket_bytes: int, source: ReducerSource | None = None
    ) -> None:
        renew(ddp, bucket_bytes, source)
        if ddp.gradient_as_bucket_view and not self._is_said:
            self._is_said = True
            log.info(
                "gradients lie in other memory from now on, and after each turn with plain DDP: "
                "those that are kept from before are written no more (gradient_as_bucket_view)"
            )

    def come_back(self) -> None:
        """Undoes `leave`."""
        if (ddp := self._ddp()) is not None:
            self._take_off = self._give(ddp)
        self.renew()


def _nothing() -> None:
    pass
