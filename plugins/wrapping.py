"""Wrapping an optimizer, whatever carries its gradients: settings, and checks."""

from __future__ import annotations

from typing import Any

from bytesched.config import Config
from bytesched.errors import PluginError
from bytesched.policy import named_policy
from bytesched.tuning.online import find_tuner

from . import registry


def settings(fields: dict[str, Any]) -> Config:
    """The settings of a wrap.

    Raises `ConfigError` for what is wrong with them, before the first collective.
    """
    config = Config.load(**fields)
    named_policy(config.policy, config.origin("policy"))
    find_tuner(config)
    return config


def check(optimizer: Any, model: Any) -> None:
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
    if registry.is_wrapped(optimizer):
        raise PluginError(why_wrapped(optimizer, model))


def why_wrapped(optimizer: Any, model: Any) -> str:
    """Why ``optimizer``, which is wrapped, is not wrapped with ``model``; what to do about it."""
    name = type(optimizer).__name__
    if any(session.root is model for session in registry.sessions(optimizer)):
        return f"this {name} is already wrapped; unwrap it first"
    return (
        f"this {name} is already wrapped, with another model than this {type(model).__name__}, and "
        "can be wrapped with only one: give each model its own optimizer, of the same class and "
        "settings, and wrap both; or leave it, and the other model trains as without bytesched"
    )
