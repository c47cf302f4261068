"""Communication scheduling for data-parallel training.

>>> optimizer = bytesched.wrap(optimizer, model)  # doctest: +SKIP

Importing this package imports no framework; `wrap` does, when it is called.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar, overload

from bytesched import tunable
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
from bytesched.version import __version__

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from bytesched.config import ConfigFields
    from bytesched.kvstore.protocol import KVStore
    from bytesched.plugins.stores.scheduled.store import ScheduledKVStore
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
    "wrap",
]

logging.getLogger("bytesched").addHandler(logging.NullHandler())


def _tuner_of(config: Config) -> tunable.Tuner:
    from bytesched.tuning.online import tuner_of

    return tuner_of(config)


tunable.provide_tuner(_tuner_of)

OptimizerT = TypeVar("OptimizerT")
WrappedT = TypeVar("WrappedT")
ClassT = TypeVar("ClassT", bound=type)


@overload
def wrap(
    optimizer: OptimizerT,
    model: object,
    *,
    kvstore: KVStore | None = None,
    **fields: Unpack[ConfigFields],
) -> OptimizerT: ...


@overload
def wrap(kv: KVStore, /, **fields: Unpack[ConfigFields]) -> ScheduledKVStore: ...


def wrap(
    optimizer: object,
    model: object = None,
    *,
    kvstore: KVStore | None = None,
    **fields: Unpack[ConfigFields],
) -> object:
    """Schedule what an optimizer's gradients, or a store's pushes and pulls, put on the wire.

    For an optimizer, `model` is a `DistributedDataParallel`, a plain module under
    `torch.distributed`, or the module behind an optimizer of `hvd.DistributedOptimizer`; the very
    same optimizer is returned. With `kvstore`, the gradients of a plain module travel through that
    store. A store alone is returned as a `ScheduledKVStore` around it, and MXNet's own as one with
    the calls of MXNet; a `gluon.Trainer` of MXNet is returned itself. The keywords are the fields
    of `Config`. Raises `PluginError` for a use that is not supported.
    """
    from bytesched import plugins

    return plugins.wrap(optimizer, model, kvstore, **fields)


def separable(cls: ClassT) -> ClassT:
    """Vouch for a class of torch optimizers: its updates may be applied parameter by parameter.

    A class that is not known steps whole, behind a barrier. Who vouches for it promises of its
    `step`, for every step and every size:

    - A parameter's update depends on that parameter, its gradient, its entry of the state and the
      values of its group as they are at `step()`, and on nothing else that the script or another
      update changes: no other parameter, gradient or entry, no list of all of them, no tensor,
      global or object that is written to. Attributes of the optimizer count as they are at
      `step()`, but not what is inside of them.
    - It draws no random numbers, and communicates with no other rank.
    - It counts nothing on the optimizer itself. What it counts in a group, it counts once a call,
      also where the group has no parameter.
    - It takes no argument but `closure`, which it calls once, before all else, and it returns
      nothing but what the closure has returned.

    Returns the class, so that it serves as a decorator; raises `PluginError` for anything but a
    class of torch optimizers. Subclasses need a word of their own. `explain_optimizer` gives
    advice.
    """
    from bytesched import plugins

    return plugins.separable(cls)


def explain_optimizer(optimizer: object) -> str:
    """Return whether updates of `optimizer` may be applied parameter by parameter, and why.

    Of a class that is not known it also returns what a trial on small copies says: the optimizer
    steps once over all parameters, and once over one after the other. That is advice for whoever
    reads the source, and decides nothing: an optimizer may do something else in later steps, or
    with larger tensors. The optimizer, and all generators of random numbers, stay as they are.
    Raises `PluginError` for anything but a torch optimizer.
    """
    from bytesched import plugins

    return plugins.explain_optimizer(optimizer)


def sharded_state(optimizer: object) -> ShardedState:
    """What `torch.distributed.checkpoint` saves and loads of an optimizer with `shard=True`.

    Each rank writes and reads the part that it holds, and nothing is gathered. Names and layout are
    those of torch's `get_optimizer_state_dict`, so that any number of ranks, sharded or plain, can
    load it. It can be used from the first `step()` on. Raises `PluginError` where the update is not
    sharded, or has not begun.
    """
    from bytesched import plugins

    return plugins.sharded_state(optimizer)


def flush(x: object = None) -> None:
    """Apply everything outstanding for a wrapped object, or for all of them.

    There is seldom a reason to call it: whatever reads a parameter, a gradient or a state dict
    waits for the value that it would have had without bytesched.
    """
    from bytesched import plugins

    plugins.flush(x)


@overload
def unwrap(x: ScheduledKVStore) -> KVStore: ...


@overload
def unwrap(x: WrappedT) -> WrappedT: ...


def unwrap(x: object) -> object:
    """Flush, take every hook off again and return the object as it was before `wrap`."""
    from bytesched import plugins

    return plugins.unwrap(x)


def stats(x: object = None) -> dict[str, int | float | str]:
    """Return the figures of a wrapped object, flat, with units in the names.

    Without `x`, of the optimizer that was wrapped last, of those that have not failed; where all
    have ended, of the last one. What each of them means stands in `bytesched.figures.Figures`.
    """
    from bytesched import plugins

    return plugins.stats(x)
