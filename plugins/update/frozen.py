"""Hyper-parameters as they are at one moment, which nobody changes afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from numbers import Number
from typing import Any, Final

import torch

#: of values that nothing can change
_PLAIN: Final = frozenset(
    {
        bool,
        bytes,
        complex,
        float,
        int,
        str,
        torch.device,
        torch.dtype,
        torch.layout,
        torch.memory_format,
        type(None),
    }
)
_COLLECTIONS: Final = (list, tuple, set, frozenset)

#: of a group, what is no hyper-parameter: which names go with a part of ``params`` is not known
_NAMING: Final = ("params", "param_names")


def snapshot(group: dict[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of ``group`` as they are now; tensors are cloned, lists copied."""
    return {key: _frozen(value) for key, value in group.items() if key not in _NAMING}


def why_not_frozen(groups: Sequence[dict[str, Any]]) -> str:
    """Why a snapshot of ``groups`` may change later; empty if it cannot."""
    for group in groups:
        for key, value in group.items():
            if key not in _NAMING and type(value) not in _PLAIN and not _can_freeze(value):
                return (
                    f"a parameter group holds {key!r}, a {type(value).__name__}, which may be "
                    "something else when the update is made"
                )
    return ""


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a snapshot."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, *_COLLECTIONS)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(item)


def _can_freeze(value: Any) -> bool:
    kind = type(value)
    if kind in _PLAIN or issubclass(kind, (torch.Tensor, Number, Enum)):
        return True
    if kind in _COLLECTIONS:
        return all(map(_can_freeze, value))
    return kind is dict and all(map(_can_freeze, (*value, *value.values())))


def _frozen(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return value.clone()
    if kind in _COLLECTIONS:
        return kind(map(_frozen, value))
    if kind is dict:
        return {key: _frozen(item) for key, item in value.items()}
    return value
