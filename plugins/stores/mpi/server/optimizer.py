"""An optimizer in the store: any class of torch.optim, its state beside the values."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from bytesched.errors import PluginError

__all__ = ["ServerOptimizer"]


class ServerOptimizer:
    """Updates one value; its hyper-parameters are those of the step.

    Args:
        name: of a class in torch.optim.
        value: the parameter, updated in place.
        hyperparameters: the keyword arguments of the class.
    """

    def __init__(self, name: str, value: torch.Tensor, hyperparameters: dict[str, Any]) -> None:
        kind = getattr(torch.optim, name, None)
        if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer):
            raise PluginError(f"torch.optim has no optimizer {name!r}")
        self._parameter = torch.nn.Parameter(value, requires_grad=value.is_floating_point())
        arguments = inspect.signature(kind).parameters
        known = {k: _from_json(v) for k, v in hyperparameters.items() if k in arguments}
        try:
            self._optimizer = kind([self._parameter], **known)
        except (TypeError, ValueError) as error:
            raise PluginError(f"torch.optim.{name} refuses {hyperparameters}: {error}") from error
        group = self._optimizer.param_groups[0]
        # A group has entries that the constructor does not take.
        if unknown := hyperparameters.keys() - group.keys():
            raise PluginError(f"torch.optim.{name} has no {', '.join(sorted(unknown))}")

    def update(self, gradient: torch.Tensor, hyperparameters: dict[str, Any]) -> None:
        """One step with ``gradient``."""
        group = self._optimizer.param_groups[0]
        for key, value in hyperparameters.items():
            group[key] = _from_json(value)
        self._parameter.grad = gradient
        self._optimizer.step()
        self._parameter.grad = None

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """The optimizer's state of this value, as tensors by name."""
        state = self._optimizer.state.get(self._parameter, {})
        return {name: torch.as_tensor(entry) for name, entry in state.items() if entry is not None}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Takes over what ``state`` was on another server."""
        self._optimizer.state[self._parameter] = {k: v.clone() for k, v in state.items()}


def _from_json(value: Any) -> Any:
    """JSON has no tuples, and optimizers check for them."""
    return tuple(value) if isinstance(value, list) else value
