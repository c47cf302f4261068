"""One training run of a trainer, wrapped from its beginning to its end."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from bytesched import plugins

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from bytesched.config import ConfigFields

log = logging.getLogger("bytesched")


class Training:
    """Wraps optimizers as training begins, and takes the hooks off again as it ends."""

    def __init__(self, **fields: Unpack[ConfigFields]) -> None:
        super().__init__()
        self._fields = fields
        self._wrapped: list[Any] = []
        self._stats: dict[str, int | float | str] = {"mode": "plain"}

    def _begin(self, optimizers: Iterable[Any], model: Any) -> None:
        """Wraps ``optimizers`` over ``model``; collective. Raises `PluginError`."""
        self._end()
        for number, optimizer in enumerate(optimizers):
            # One model has one session, and its settings.
            fields = {} if number else self._fields
            self._wrapped.append(plugins.wrap(optimizer, model, **fields))

    def _end(self) -> None:
        """Everything is applied, and training is over."""
        if not self._wrapped:
            return
        plugins.flush(self._wrapped[-1])
        self._stats = plugins.stats(self._wrapped[-1])
        for optimizer in self._wrapped:
            plugins.unwrap(optimizer)
        self._wrapped.clear()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Called by the trainer, on every rank."""
        self._end()

    @property
    def stats(self) -> dict[str, int | float | str]:
        """The figures of `bytesched.stats`, also after the training."""
        return plugins.stats(self._wrapped[-1]) if self._wrapped else self._stats
