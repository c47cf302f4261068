"""The modules that are alive around some parameters."""

from __future__ import annotations

import gc
import sys
from collections import defaultdict
from typing import Any, TypeVar

import torch
from torch import nn

T = TypeVar("T")


def parameter_ids(owner: nn.Module | torch.optim.Optimizer) -> set[int]:
    """The ids of all parameters of ``owner`` that require a gradient."""
    if isinstance(owner, nn.Module):
        parameters = list(owner.parameters())
    else:
        parameters = [p for group in owner.param_groups for p in group["params"]]
    return {id(parameter) for parameter in parameters if parameter.requires_grad}


def owners_of(parameters: set[int]) -> list[nn.Module]:
    """All modules that contain all of ``parameters``."""
    parents: dict[int, list[nn.Module]] = defaultdict(list)
    found: dict[int, nn.Module] = {}
    some = next(iter(parameters), 0)
    for module in _alive(nn.Module):
        if "_modules" not in vars(module):
            # Its constructor has not been called.
            continue
        for child in module.children():
            parents[id(child)].append(module)
        if any(id(parameter) == some for parameter in module.parameters(recurse=False)):
            found[id(module)] = module
    waiting = list(found.values())
    while waiting:
        for parent in parents[id(waiting.pop())]:
            if id(parent) not in found:
                found[id(parent)] = parent
                waiting.append(parent)
    return [module for module in found.values() if parameters <= parameter_ids(module)]


def compiled_around(module: nn.Module) -> list[nn.Module]:
    """What ``torch.compile`` has made of ``module``."""
    compiler: Any = sys.modules.get("torch._dynamo.eval_frame")
    if compiler is None:
        return []
    return [
        m for m in _alive(compiler.OptimizedModule) if vars(m)["_modules"]["_orig_mod"] is module
    ]


def _alive(kind: type[T]) -> list[T]:
    # Not isinstance: it reads the class of proxies of all kinds.
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]
