"""The framework side of bytesched: ``wrap`` and the plugins it chooses from."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any, TypeVar

if __name__ != "bytesched.plugins":
    raise ImportError(
        f"imported as {__name__!r}: this folder is the package bytesched.plugins; "
        "import it under that name, or there would be two copies of its classes"
    )

from bytesched.config import Config
from bytesched.errors import BytesschedError, PluginError, in_one_line

from .registry import add, announce, flush, is_wrapped, session_of, stats, unwrap
from .wrapping import check, settings

if TYPE_CHECKING:
    from .registry import Wrapped
    from .zero1.checkpoint import ShardedState

__all__ = ["explain_optimizer", "flush", "separable", "sharded_state", "stats", "unwrap", "wrap"]

ClassT = TypeVar("ClassT", bound=type)

log = logging.getLogger("bytesched")


def wrap(
    optimizer: Any,
    model: Any = None,
    kvstore: Any = None,
    groups: Any = None,
    accumulate: Any = None,
    micro_batches: Any = 1,
    **fields: Any,
) -> Any:
    """See :func:`bytesched.wrap`."""
    model = _staged(model)
    announce(optimizer, model)
    return wrap_found(optimizer, model, kvstore, groups or {}, accumulate, micro_batches, **fields)


def separable(cls: ClassT) -> ClassT:
    """See :func:`bytesched.separable`."""
    from .update.separable import separable as vouch_for

    return vouch_for(cls)


def explain_optimizer(optimizer: Any) -> str:
    """See :func:`bytesched.explain_optimizer`."""
    from .update.separable import explain_optimizer as explain

    if not _is_horovods(optimizer):
        return explain(optimizer)
    from .horovod.optimizer import updating_class

    return explain(optimizer, updating_class(optimizer))


def sharded_state(optimizer: Any) -> ShardedState:
    """See :func:`bytesched.sharded_state`."""
    session: Any = session_of(optimizer)
    state_of = getattr(getattr(session, "owners", None), "state_of", None)
    if state_of is None:
        raise PluginError(
            f"{type(optimizer).__name__} was not wrapped with shard=True: its state_dict() is what "
            "there is to save"
        )
    state: ShardedState = state_of(optimizer, session.synchronize_all)
    return state


def wrap_found(
    optimizer: Any,
    model: Any = None,
    kvstore: Any = None,
    groups: Any = None,
    accumulate: Any = None,
    micro_batches: Any = 1,
    **fields: Any,
) -> Any:
    """As :func:`wrap`, for what was found in a script that does not call it."""
    is_mxnet = model is None and type(optimizer).__module__.split(".")[0] == "mxnet"
    is_store = model is None and all(hasattr(optimizer, n) for n in ("init", "push", "pull"))
    try:
        config = settings(fields)
        if (accumulate, micro_batches) != (None, 1):
            from .moments.slots import check_request

            check_request(accumulate, micro_batches)
        if not is_mxnet and not is_store:
            check(optimizer, model)
        if config.share and (is_mxnet or is_store):
            raise PluginError(
                "share is for models of torch, whose forward and backward passes take turns: a "
                "store, or MXNet, has none"
            )
        if is_mxnet or is_store or kvstore is not None or _is_horovods(optimizer):
            if config.shard:
                raise PluginError(
                    "shard = True needs the ranks of torch.distributed: it is not there for "
                    "Horovod, MXNet and parameter stores"
                )
            if config.split == "on":
                raise PluginError(
                    "split = 'on' needs the ranks of torch.distributed: it is not there for "
                    "Horovod, MXNet and parameter stores"
                )
            if accumulate is not None:
                raise PluginError(
                    f"accumulate = {accumulate!r} needs the ranks of torch.distributed: it is not "
                    "there for Horovod, MXNet and parameter stores"
                )
            if model is not None and _has_groups(model, groups):
                raise PluginError(
                    "parameters that only some ranks reduce need torch.distributed: there are no "
                    "such groups for Horovod, MXNet and parameter stores"
                )
    except BytesschedError as error:
        if kvstore is None:
            _decline(optimizer, model, groups, error)
        raise
    if is_mxnet:
        from .stores.mxnet.begin import begin as wrap_mxnet

        return wrap_mxnet(optimizer, config)
    if is_store:
        from .stores.scheduled import begin as wrap_store

        return wrap_store(optimizer, config)
    session = _begin(
        optimizer,
        model,
        config,
        kvstore=kvstore,
        groups=groups,
        micro_batches=micro_batches if accumulate else None,
        is_configured=bool(fields),
    )
    if session is not None:
        add(optimizer, session, figures=config.figures)
    return optimizer


def _begin(
    optimizer: Any,
    model: Any,
    config: Config,
    *,
    kvstore: Any,
    groups: Any,
    micro_batches: int | None,
    is_configured: bool,
) -> Wrapped | None:
    """The session behind an optimizer, over what carries its gradients; collective."""
    if kvstore is not None:
        from .stores.training.begin import begin as begin_over_store

        return begin_over_store(optimizer, model, kvstore, config)
    if _is_horovods(optimizer):
        from .horovod.optimizer import begin as begin_over_horovod

        return begin_over_horovod(optimizer, model, config)
    if _is_pipeline(model):
        from .pipelines.begin import begin as begin_over_replicas

        if micro_batches is not None:
            raise PluginError(
                "accumulate is not there for pipelines, whose micro-batches are the schedule's"
            )
        return begin_over_replicas(optimizer, model, config, groups)
    from .c10d.ddp import begin as begin_over_c10d
    from .moments.slots import Accumulation

    accumulation = None if micro_batches is None else Accumulation(optimizer, micro_batches)
    return begin_over_c10d(
        optimizer, model, config, groups, accumulation, is_configured=is_configured
    )


def _decline(optimizer: Any, model: Any, groups: Any, error: BytesschedError) -> None:
    """The other ranks, which may wrap and wait for this one, are left its ``error``."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(model, torch.nn.Module) or is_wrapped(optimizer):
        return
    try:
        if _is_horovods(optimizer):
            from .horovod.entry import decline as decline_over_horovod

            decline_over_horovod(optimizer, in_one_line(error))
            return
        if _is_pipeline(model):
            from .pipelines.begin import decline as decline_over_replicas

            decline_over_replicas(model, groups, in_one_line(error))
            return
        from .c10d.ddp import decline as decline_over_c10d

        decline_over_c10d(model, in_one_line(error))
    except Exception:
        log.debug("the other ranks do not know of the error", exc_info=True)


def _staged(model: Any) -> Any:
    """``model``, or the stages of the pipeline that it is."""
    if "torch.distributed.pipelining" not in sys.modules:
        return model
    from .pipelines.root import staged

    return staged(model)


def _is_pipeline(model: Any) -> bool:
    root = sys.modules.get("bytesched.plugins.pipelines.root")
    return root is not None and isinstance(model, root.StageModules)


def _has_groups(model: Any, groups: Any) -> bool:
    from .c10d.grouping import has_groups

    return has_groups(model, groups)


def _is_horovods(optimizer: Any) -> bool:
    return "horovod.torch" in sys.modules and hasattr(optimizer, "_allreduce_grad_async")
