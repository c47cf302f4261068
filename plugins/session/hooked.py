"""A model with hooks of ours in it: what every session is, from its first error to its end."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from torch import nn

from bytesched.observe import Observers
from bytesched.plugins.layout.plan import Plan
from bytesched.plugins.layout.slots import Slot
from bytesched.plugins.proxies.first_use import FirstUse
from bytesched.plugins.proxies.pending import is_held, release
from bytesched.plugins.session.backend import Backend
from bytesched.plugins.session.carrier import Traffic
from bytesched.plugins.session.meter import Meter
from bytesched.plugins.session.progress import Progress
from bytesched.plugins.session.settling import Settling
from bytesched.plugins.session.streams import streams_for
from bytesched.plugins.session.updater import Updater

__all__ = ["HookedModel"]

log = logging.getLogger("bytesched")


class HookedModel(ABC):
    """One wrapped model.

    Who inherits hooks the model and keeps in ``_undo`` what ends that. Its ``plan`` comes
    last, when the order of first use is known and everything that is closed with it is there.

    Args:
        root: the module whose call is a forward pass.
        slots: its parameters, in registration order, the same on all ranks.
        backend: the ranks.
    """

    def __init__(
        self, root: nn.Module, slots: Sequence[Slot], backend: Backend, observers: Observers
    ) -> None:
        self.root = root
        self.plan: Plan | None = None
        self._backend = backend
        self._observers = observers
        self._closed = False
        self._undo: list[Callable[[], None]] = []
        self._meter = Meter(observers, len(slots))
        self._progress = Progress(backend)
        self._streams = streams_for(slots[0].parameter.device, self._progress.fail)
        self._first_use = FirstUse(root, [slot.parameter for slot in slots])
        # - with the plan
        self._settling: Settling
        self._updater: Updater

    @property
    @abstractmethod
    def mode(self) -> str:
        """In one word, what is done for this model."""

    @abstractmethod
    def _stop_sending(self) -> None:
        """Ends what sends the plan's chunks, and its threads."""

    @abstractmethod
    def _give_back(self, slot: Slot, *, is_failed: bool) -> None:
        """Makes the gradient of ``slot`` the user's, for good, if it has a value."""

    @property
    def error(self) -> BaseException | None:
        """The first error, which is final."""
        return self._progress.error

    def fail(self, error: BaseException) -> None:
        """Ends everything under way, on every rank."""
        self._progress.fail(error)

    def flush(self) -> None:
        """Every step that was taken is applied."""
        self._progress.check()
        self._settle_all()

    def _settle_all(self) -> None:
        if self.plan is not None:
            self._settling.settle_all()

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
        if self.plan is not None:
            self._stop_sending()
            self._updater.close()
            for slot in self.plan.slots:
                if release_parameters and is_held(slot.parameter):
                    release(slot.parameter)
                self._give_back(slot, is_failed=not release_parameters)
        self._backend.close()
        self._observers.close()

    def _figures(self, traffic: Traffic, order: str) -> dict[str, int | float | str]:
        return {
            **self._meter.figures(traffic),
            "mode": self.mode,
            "order": order,
            "rank": self._backend.rank,
            "world_size": self._backend.size,
        }

    def __repr__(self) -> str:
        if self.error is not None:
            state = f"failed: {self.error}"
        elif self.plan is None:
            state = "warming up"
        else:
            held = sum(bundle.held for bundle in self.plan.bundles)
            left = self._progress.outstanding
            state = f"{left} chunks outstanding, {held} bundles held, {self.plan!r}"
        return f"<bytesched rank {self._backend.rank} of {self._backend.size}: {state}>"
