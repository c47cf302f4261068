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
from bytesched.policy import named_policy
from bytesched.tuning.online import find_tuner

from .registry import (
    add,
    before_wrap,
    flush,
    is_wrapped,
    session_of,
    stats,
    unwrap,
    why_wrapped,
)

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
    if "torch.distributed.pipelining" in sys.modules:
        from .pipelines.root import staged

        model = staged(model)
    for hook in before_wrap:
        hook(optimizer, model)
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
    is_horovods = _is_horovods(optimizer)
    try:
        config = _settings(fields)
        if (accumulate, micro_batches) != (None, 1):
            from .moments.slots import check_request

            check_request(accumulate, micro_batches)
        if is_mxnet or is_store:
            if config.share:
                raise PluginError(
                    "share is for models of torch, whose forward and backward passes take turns: "
                    "a store, or MXNet, has none"
                )
        else:
            _check(optimizer, model)
        if is_mxnet or is_store or kvstore is not None or is_horovods:
            _refuse_what_needs_ranks(config, model, groups, accumulate)
    except BytesschedError as error:
        if kvstore is None:
            _decline(optimizer, model, groups, in_one_line(error))
        raise
    if is_mxnet:
        from .stores.mxnet.begin import begin as wrap_mxnet

        return wrap_mxnet(optimizer, config)
    if is_store:
        from .stores.scheduled import begin as wrap_store

        return wrap_store(optimizer, config)
    # Each is collective, and returns nothing for what stays as it was.
    session: Wrapped | None
    if kvstore is not None:
        from .stores.training.begin import begin as begin_over_store

        session = begin_over_store(optimizer, model, kvstore, config)
    elif is_horovods:
        from .horovod.optimizer import begin as begin_over_horovod

        session = begin_over_horovod(optimizer, model, config)
    elif _is_pipeline(model):
        from .pipelines.begin import begin as begin_over_replicas

        if accumulate:
            raise PluginError(
                "accumulate is not there for pipelines, whose micro-batches are the schedule's"
            )
        session = begin_over_replicas(optimizer, model, config, groups)
    else:
        from .c10d.ddp import begin as begin_over_c10d
        from .moments.slots import Accumulation

        accumulation = Accumulation(optimizer, micro_batches) if accumulate else None
        session = begin_over_c10d(
            optimizer, model, config, groups, accumulation, is_configured=bool(fields)
        )
    if session is not None:
        add(optimizer, session, figures=config.figures)
    return optimizer


def _settings(fields: dict[str, Any]) -> Config:
    """Those of a wrap. Raises `ConfigError` for what is wrong with them."""
    config = Config.load(**fields)
    named_policy(config.policy, config.origin("policy"))
    find_tuner(config)
    return config


def _check(optimizer: Any, model: Any) -> None:
    """Raises `PluginError` unless ``optimizer`` may be wrapped with ``model``."""
    try:
        import torch
    except ImportError as error:
        raise PluginError("wrapping needs PyTorch: pip install 'bytesched[torch]'") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise PluginError(f"{type(optimizer).__name__} is neither a torch optimizer nor a KVStore")
    if model is None:
        raise PluginError(
            "wrap(optimizer, model) needs the model whose parameters the optimizer updates: the "
            "DistributedDataParallel, or the module itself"
        )
    if not isinstance(model, torch.nn.Module):
        raise PluginError(f"{type(model).__name__} is not a torch module")
    if is_wrapped(optimizer):
        raise PluginError(why_wrapped(optimizer, model))


def _refuse_what_needs_ranks(config: Config, model: Any, groups: Any, accumulate: Any) -> None:
    """Raises `PluginError` for what is there over torch.distributed alone."""
    asked = {
        "shard = True": config.shard,
        "split = 'on'": config.split == "on",
        f"accumulate = {accumulate!r}": accumulate is not None,
    }
    if found := [name for name, is_asked in asked.items() if is_asked]:
        raise PluginError(
            f"{found[0]} needs the ranks of torch.distributed: it is not there for Horovod, MXNet "
            "and parameter stores"
        )
    if model is not None:
        from .c10d.grouping import has_groups

        if has_groups(model, groups):
            raise PluginError(
                "parameters that only some ranks reduce need torch.distributed: there are no such "
                "groups for Horovod, MXNet and parameter stores"
            )


def _decline(optimizer: Any, model: Any, groups: Any, why: str) -> None:
    """The other ranks, which may wrap and wait for this one, are told ``why`` it does not."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(model, torch.nn.Module) or is_wrapped(optimizer):
        return
    try:
        if _is_horovods(optimizer):
            from .horovod.entry import decline as decline_over_horovod

            decline_over_horovod(optimizer, why)
        elif _is_pipeline(model):
            from .pipelines.begin import decline as decline_over_replicas

            decline_over_replicas(model, groups, why)
        else:
            from .c10d.ddp import decline as decline_over_c10d

            decline_over_c10d(model, why)
    except Exception:
        log.debug("the other ranks do not know of the error", exc_info=True)


def _is_pipeline(model: Any) -> bool:
    root = sys.modules.get("bytesched.plugins.pipelines.root")
    return root is not None and isinstance(model, root.StageModules)


def _is_horovods(optimizer: Any) -> bool:
    return "horovod.torch" in sys.modules and hasattr(optimizer, "_allreduce_grad_async")
