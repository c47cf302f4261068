"""A model with hooks of ours in it: what every session is, from its first error to its end."""

from __future__ import annotations

import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NoReturn

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bytesched.observe import Observers
from bytesched.share.turn import turn_figures
from bytesched.urgency import URGENCY

from ..dependency.progress import Progress
from ..figures.meter import Meter
from ..layout.plan import Plan
from ..layout.slots import Slot
from ..proxies.first_use import FirstUse
from ..routes.backend import Backend
from ..routes.streams import streams_for
from .phase import Life

__all__ = ["HookedModel"]

log = logging.getLogger("bytesched")


class HookedModel(ABC):
    """One wrapped model.

    Who inherits hooks the model and keeps in ``_undo`` what ends that.

    Args:
        root: the module whose call is a forward pass; not kept alive.
        slots: its parameters, in registration order, the same on all ranks.
        backend: the ranks.
    """

    def __init__(
        self, root: nn.Module, slots: Sequence[Slot], backend: Backend, observers: Observers
    ) -> None:
        self._root = weakref.ref(root)
        inner = root.module if isinstance(root, DistributedDataParallel) else root
        self._name = type(inner).__name__
        self._backend = backend
        self._observers = observers
        self._closed = False
        #: this process was forked from that of the session
        self._is_disowned = False
        self._undo: list[Callable[[], None]] = []
        self._meter = Meter(observers, len(slots), lambda: self._life.traffic.busy_ns)
        self._progress = Progress(backend, slots)
        self._streams = streams_for(slots[0].parameter.device, self._progress.fail)
        self._first_use = FirstUse(root, [slot.parameter for slot in slots])

    @property
    def root(self) -> nn.Module | None:
        """The module whose call is a forward pass; None when nothing else refers to it any more."""
        return self._root()

    @property
    @abstractmethod
    def mode(self) -> str:
        """In one word, what is done for this model."""

    @property
    @abstractmethod
    def _life(self) -> Life:
        """What it does at the moment."""

    @property
    def plan(self) -> Plan | None:
        """What is sent; None while that is not known."""
        return self._life.plan

    @property
    def observers(self) -> Observers:
        """What watches this session, and may watch what runs inside it."""
        return self._observers

    @property
    def is_measuring(self) -> bool:
        """Whether rounds are sent as those after them, so that they count in its figures."""
        return self._meter.is_measuring

    @property
    def error(self) -> BaseException | None:
        """The first error, which is final."""
        return self._progress.error

    @property
    def unseen_error(self) -> BaseException | None:
        """That error, if it was raised nowhere yet."""
        return None if self._progress.is_error_seen else self._progress.error

    def disown(self) -> None:
        """In a forked child: parameters and gradients are ordinary ones, as they are now.

        Those that were not there when the process was forked raise PluginError when they are read.
        """
        self._is_disowned = True
        self._life.disown()

    def fail(self, error: BaseException) -> None:
        """Ends everything under way, on every rank; the user's thread raises ``error`` now."""
        self._progress.fail(error, is_raised=True)

    def raise_first(self, error: BaseException) -> NoReturn:
        """As `fail`; raises ``error``, or what came before it and has brought it about."""
        self._progress.raise_first(error)

    def flush(self) -> None:
        """Every step that was taken is applied."""
        self._progress.check()
        self._life.synchronize_all()

    def restore(self) -> None:
        """What is spread over the ranks is whole here: they go on without each other."""
        self._progress.check()

    def leave(self) -> None:
        """Other ranks hear that this one takes no more steps; it waits for none. Idempotent."""
        self._progress.check()

    def close(self, *, release_parameters: bool = True) -> None:
        """Takes every hook off and stops every thread; does not flush. Idempotent.

        Parameters whose update is outstanding become ordinary ones, with the value they have,
        unless ``release_parameters`` is false: then reading them raises the first error.
        """
        if self._closed:
            return
        self._closed = True
        self._first_use.close()
        for undo in reversed(self._undo):
            try:
                undo()
            except Exception:
                log.exception("a part of this session could not be ended")
        self._streams.close()
        self._life.close(release_parameters=release_parameters)
        self._backend.close()
        self._observers.close()

    def stats(self) -> dict[str, int | float | str]:
        """Figures since the warm-up: those of `bytesched.figures.Figures`."""
        return {
            **self._meter.figures(self._life.traffic),
            "model": self._name,
            "mode": self.mode,
            "order": self._life.order,
            "levels": self._backend.levels,
            "rank": self._backend.rank,
            "world_size": self._backend.size,
            **URGENCY.figures(),
            **turn_figures(),
        }

    def __repr__(self) -> str:
        state = self._life.state() if self.error is None else f"failed: {self.error}"
        return f"<bytesched rank {self._backend.rank} of {self._backend.size}: {state}>"
