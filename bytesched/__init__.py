"""Communication scheduling for data-parallel training.

>>> optimizer = bytesched.wrap(optimizer, model)  # doctest: +SKIP

Importing this package imports no framework; `wrap` does, when it is called.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar

from bytesched.config import Config
from bytesched.errors import (
    BytesschedError,
    ConfigError,
    InvalidTransition,
    MismatchError,
    PeerLost,
    PluginError,
    SchedulerClosed,
    SchedulerTimeout,
    TransportError,
    UnusedParameterError,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from bytesched.config import ConfigFields

__version__ = "0.1.0"

__all__ = [
    "BytesschedError",
    "Config",
    "ConfigError",
    "InvalidTransition",
    "MismatchError",
    "PeerLost",
    "PluginError",
    "SchedulerClosed",
    "SchedulerTimeout",
    "TransportError",
    "UnusedParameterError",
    "__version__",
    "flush",
    "stats",
    "unwrap",
    "wrap",
]

logging.getLogger("bytesched").addHandler(logging.NullHandler())

OptimizerT = TypeVar("OptimizerT")
WrappedT = TypeVar("WrappedT")


def wrap(optimizer: OptimizerT, model: object, **fields: Unpack[ConfigFields]) -> OptimizerT:
    """Return the very same optimizer, its model's gradients now scheduled.

    `model` is a `DistributedDataParallel`, or a plain module under `torch.distributed`; the
    keywords are the fields of `Config`. Raises `PluginError` for a use that is not supported.
    """
    from bytesched import plugins

    plugins.wrap(optimizer, model, **fields)
    return optimizer


def flush(x: object = None) -> None:
    """Apply everything outstanding for a wrapped object, or for all of them."""
    from bytesched import plugins

    plugins.flush(x)


def unwrap(x: WrappedT) -> WrappedT:
    """Flush, take every hook off again and return the object as it was before `wrap`."""
    from bytesched import plugins

    plugins.unwrap(x)
    return x


def stats(x: object = None) -> dict[str, int | float | str]:
    """Return figures of a wrapped object, flat, with units in the names."""
    from bytesched import plugins

    return plugins.stats(x)
