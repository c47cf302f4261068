"""The framework side of bytesched: ``wrap`` and the plugins it chooses from."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

if __name__ != "bytesched.plugins":
    raise ImportError(
        f"imported as {__name__!r}: this folder is the package bytesched.plugins; "
        "import it under that name, or there would be two copies of its classes"
    )

from bytesched.config import Config
from bytesched.plugins.registry import announce, flush, stats, unwrap
from bytesched.plugins.wrapping import settings, wrap_optimizer

if TYPE_CHECKING:
    from bytesched.plugins.registry import Wrapped

__all__ = ["flush", "separable", "stats", "unwrap", "wrap"]

ClassT = TypeVar("ClassT", bound=type)


def wrap(optimizer: Any, model: Any = None, kvstore: Any = None, **fields: Any) -> Any:
    """See :func:`bytesched.wrap`."""
    announce(optimizer, model)
    return wrap_found(optimizer, model, kvstore, **fields)


def separable(cls: ClassT) -> ClassT:
    """See :func:`bytesched.separable`."""
    from bytesched.plugins.optimizer import separable as vouch_for

    return vouch_for(cls)


def wrap_found(optimizer: Any, model: Any = None, kvstore: Any = None, **fields: Any) -> Any:
    """As :func:`wrap`, for what was found in a script that does not call it."""
    config = settings(fields)
    if model is None and type(optimizer).__module__.split(".")[0] == "mxnet":
        from bytesched.plugins.mxnet.begin import begin as wrap_mxnet

        return wrap_mxnet(optimizer, config)
    if model is None and all(hasattr(optimizer, name) for name in ("init", "push", "pull")):
        from bytesched.plugins.kvstore.begin import begin as wrap_store

        return wrap_store(optimizer, config)
    begin = partial(_begin, kvstore=kvstore, is_configured=bool(fields))
    return wrap_optimizer(optimizer, model, config, begin)


def _begin(
    optimizer: Any, model: Any, config: Config, *, kvstore: Any, is_configured: bool
) -> Wrapped | None:
    """The session behind an optimizer, over what carries its gradients; collective."""
    if kvstore is not None:
        from bytesched.plugins.kvstore.training.begin import begin as begin_over_store

        return begin_over_store(optimizer, model, kvstore, config)
    if "horovod.torch" in sys.modules and hasattr(optimizer, "_allreduce_grad_async"):
        from bytesched.plugins.horovod.optimizer import begin as begin_over_horovod

        return begin_over_horovod(optimizer, model, config)
    from bytesched.plugins.c10d.ddp import begin as begin_over_c10d

    return begin_over_c10d(optimizer, model, config, is_configured=is_configured)
