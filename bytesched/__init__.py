"""Communication scheduling for data-parallel training.

>>> optimizer = bytesched.wrap(optimizer, model)  # doctest: +SKIP

Importing this package imports no framework; `wrap` does, when it is called.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar, overload

from bytesched.config import Config
from bytesched.errors import (
    BackgroundError,
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
from bytesched.urgency import urgent
from bytesched.version import __version__

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from bytesched.config import ConfigFields
    from bytesched.kvstore.protocol import KVStore
    from bytesched.plugins.stores.scheduled import ScheduledKVStore
    from bytesched.plugins.zero1.checkpoint import ShardedState

__all__ = [
    "BackgroundError",
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
    "explain_optimizer",
    "flush",
    "separable",
    "sharded_state",
    "stats",
    "unwrap",
    "urgent",
    "wrap",
]

logging.getLogger("bytesched").addHandler(logging.NullHandler())


OptimizerT = TypeVar("OptimizerT")
WrappedT = TypeVar("WrappedT")
ClassT = TypeVar("ClassT", bound=type)


@overload
def wrap(
    optimizer: OptimizerT,
    model: object,
    *,
    kvstore: KVStore | None = None,
    groups: object = None,
    accumulate: str | None = None,
    micro_batches: int = 1,
    **fields: Unpack[ConfigFields],
) -> OptimizerT: ...


@overload
def wrap(kv: KVStore, /, **fields: Unpack[ConfigFields]) -> ScheduledKVStore: ...


def wrap(
    optimizer: object,
    model: object = None,
    *,
    kvstore: KVStore | None = None,
    groups: object = None,
    accumulate: str | None = None,
    micro_batches: int = 1,
    **fields: Unpack[ConfigFields],
) -> object:
    """Schedule the gradients of an optimizer, or the pushes and pulls of a store.

    For an optimizer, `model` is a `DistributedDataParallel`, a plain module under
    `torch.distributed`, a schedule of `torch.distributed.pipelining` (or all modules of its stages
    on this rank), or the module behind an optimizer made by `hvd.DistributedOptimizer`.
    Returns the very same optimizer. With `kvstore`, the gradients of a plain module travel through
    that store.

    With `groups`, gradients of some parameters are reduced over some ranks only: it maps a
    parameter, or a module for all parameters below it, to a process group, or to None for no other
    rank. A module's attribute `data_parallel_group` says the same. For a pipeline, it is the
    process group of the ranks that have the same stages.

    With `accumulate="adama"`, Adam and AdamW fold each of `micro_batches` gradients into their
    moments as it comes, and release it: no memory for gradients, other steps than Adam's.

    A store alone is returned as a `ScheduledKVStore` around it; MXNet's own store gets one with the
    calls of MXNet. A `gluon.Trainer` of MXNet is returned itself.

    The keywords are the fields of `Config`. Raises `PluginError` for a use that is not supported.
    """
    from bytesched import plugins

    return plugins.wrap(optimizer, model, kvstore, groups, accumulate, micro_batches, **fields)


def separable(cls: ClassT) -> ClassT:
    """Vouch for a class of torch optimizers: its updates may be applied parameter by parameter.

    A class that is not known steps whole, behind a barrier. If you vouch for it, you promise the
    following of its `step`, for every step and every size:

    - A parameter's update depends on that parameter, its gradient, its entry of the state and the
      values of its group as they are at `step()`, and on nothing else that the script or another
      update changes: no other parameter, gradient or entry, no list of all of them, no tensor,
      global or object that is written to. Attributes of the optimizer count as they are at
      `step()`, but not their contents.
    - It draws no random numbers and does not communicate with other ranks.
    - It counts nothing on the optimizer itself. What it counts in a group, it counts once per call,
      also if the group has no parameter.
    - Its only argument is `closure`. It calls the closure once, before all else, and returns only
      what the closure returned.

    Returns the class, so that it works as a decorator. Raises `PluginError` for anything but a
    class of torch optimizers. Vouch for each subclass separately.
    """
    from bytesched import plugins

    return plugins.separable(cls)


def explain_optimizer(optimizer: object) -> str:
    """Return whether updates of `optimizer` may be applied parameter by parameter, and why.

    Raises `PluginError` for anything but a torch optimizer.
    """
    from bytesched import plugins

    return plugins.explain_optimizer(optimizer)


def sharded_state(optimizer: object) -> ShardedState:
    """Return what `torch.distributed.checkpoint` saves and loads for a sharded optimizer.

    Each rank writes and reads the part that it holds; nothing is gathered. Names and layout match
    torch's `get_optimizer_state_dict`, so any number of ranks, sharded or plain, can load it. Use
    it from the first `step()` on. Raises `PluginError` if the update is not sharded, or has not
    started yet.
    """
    from bytesched import plugins

    return plugins.sharded_state(optimizer)


def flush(x: object = None) -> None:
    """Apply everything outstanding for a wrapped object, or for all of them.

    You seldom need it: any read of a parameter, a gradient or a state dict waits for the value that
    it would have without bytesched.
    """
    from bytesched import plugins

    plugins.flush(x)


@overload
def unwrap(x: ScheduledKVStore) -> KVStore: ...


@overload
def unwrap(x: WrappedT) -> WrappedT: ...


def unwrap(x: object) -> object:
    """Flush, remove every hook and return the object as it was before `wrap`."""
    from bytesched import plugins

    return plugins.unwrap(x)


def stats(x: object = None) -> dict[str, int | float | str]:
    """Return the figures of a wrapped object, flat, with units in the names.

    Without `x`: the figures of the optimizer that was wrapped last and has not failed; if all have
    ended, of the last one. `bytesched.figures.Figures` says what each figure means.
    """
    from bytesched import plugins

    return plugins.stats(x)
