"""Accelerate: `wrap` for what `Accelerator.prepare` returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bytesched import plugins
from bytesched.errors import PluginError

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from bytesched.config import ConfigFields

__all__ = ["wrap"]


def wrap(*prepared: Any, **fields: Unpack[ConfigFields]) -> Any:
    """Schedule what `Accelerator.prepare` has prepared; returns it, in the same order.

    `model, optimizer, loader = wrap(*accelerator.prepare(model, optimizer, loader))`. Each
    optimizer is wrapped over the model whose parameters it updates; loaders and schedules pass
    through. On one process nothing is wrapped. The keywords are the fields of `bytesched.Config`.
    Raises `PluginError` for a model that is not under DDP, or an optimizer without its model.
    """
    import torch
    from torch.nn.parallel import DistributedDataParallel

    optimizers = [thing for thing in prepared if isinstance(thing, torch.optim.Optimizer)]
    models = [thing for thing in prepared if isinstance(thing, torch.nn.Module)]
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        for model in models:
            if not isinstance(getattr(model, "_orig_mod", model), DistributedDataParallel):
                raise PluginError(f"{type(model).__name__} is not under DDP, and stays as it is")
        known: set[int] = set()
        for optimizer in optimizers:
            model = _model_of(optimizer, models)
            # One model has one session, and its settings.
            plugins.wrap(optimizer, model, **({} if id(model) in known else fields))
            known.add(id(model))
    return prepared[0] if len(prepared) == 1 else prepared


def _model_of(optimizer: Any, models: list[Any]) -> Any:
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for model in models:
        if any(id(parameter) in mine for parameter in model.parameters()):
            return model
    raise PluginError(
        f"none of these models has parameters of {type(optimizer).__name__}: give what prepare() "
        "returned for both"
    )
