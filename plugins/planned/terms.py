"""What a session is begun with, and who owns parameters where ranks do not all update all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from bytesched.config import Config
from bytesched.observe import Observers
from bytesched.tunable import Setting

from .buckets import Bucket
from .bundles import Slot
from .questions import Ask
from .updates import Parts, Updates
from .wire import Wire

__all__ = ["OpenUpdates", "Owners", "Terms", "setting_of"]


class Owners(Protocol):
    """Ranks that update a share of the parameters each: sums go to them, and parameters come."""

    @property
    def measure(self) -> Ask | None:
        """What answers about gradients that owners have; None: nothing does."""

    @property
    def busy_ns(self) -> int:
        """For how long something was under way in the last round; 0: not known."""

    def deal(self) -> None:
        """Every parameter has its owners from now on. Idempotent."""

    def forward_begins(self) -> None:
        """A forward pass begins in which DDP waits for all ranks."""

    def round_begins(self) -> None:
        """The first bucket of a round is ready. In a hook of the reducer: nothing waits."""

    def start(self, bucket: Bucket) -> None:
        """The sums of ``bucket`` go to their owners. In a hook of the reducer: nothing waits."""

    def bring(self, buckets: Sequence[Bucket], by: str) -> None:
        """Returns when no sum is under way, and those of ``buckets`` are here; collective."""

    def let_go(self) -> None:
        """Nothing is under way any more: works keep connections open."""

    def refuse_late(self) -> None:
        """Raises `PluginError` where an optimizer comes too late to be dealt with."""

    def restore(self) -> None:
        """Optimizers get the state that other ranks hold: from here on they are ordinary ones."""

    def leave(self) -> None:
        """Other ranks hear that this one takes no more steps; it waits for none of them."""

    def disown(self) -> None:
        """In a forked child: no other rank can be asked."""

    def close(self) -> None:
        """Returns when no other rank needs anything of this one any more."""


#: Makes what updates parameters, and their owners, where each rank updates a share of them.
OpenUpdates: TypeAlias = Callable[[Parts], tuple[Owners | None, Updates]]


@dataclass(frozen=True, eq=False)
class Terms:
    """What whoever attaches a model has found out about it, and has opened."""

    #: its parameters, in registration order, the same on all ranks
    slots: Sequence[Slot]
    config: Config
    wire: Wire
    observers: Observers
    #: the sizes in use
    setting: Setting
    #: of gradients; None: the number of ranks; 1: the wire divides
    divisor: int | None = None
    #: of a chunk that goes in two halves, of two ranks; 0: none does
    halves_bytes: int = 0
    #: what sums, such as "gloo", as it is remembered with ``tune``; empty: sizes stay
    carrier: str = ""
    #: opens what updates parameters; None: all ranks update all from gradients
    open_updates: OpenUpdates | None = None


def setting_of(config: Config, partition_bytes: int) -> Setting:
    """The sizes of ``config``, which has ``partition_bytes`` where it says nothing."""
    partition_bytes = config.partition_bytes or partition_bytes
    return Setting(partition_bytes, max(config.credit_bytes, 2 * partition_bytes), config.policy)
