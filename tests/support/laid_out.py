"""Parameters and their plan, with nothing around them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from bytesched.plugins.layout.plan import Plan
from bytesched.plugins.layout.slots import Slot


def parameters(*shapes: Sequence[int], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """One of each shape; no two of their elements are equal."""
    made, first = [], 0
    for shape in shapes:
        n = torch.Size(shape).numel()
        values = torch.arange(first, first + n, dtype=torch.float64)
        made.append(nn.Parameter(values.reshape(shape).to(dtype)))
        first += n
    return made


def plan_of(
    wanted: Sequence[nn.Parameter], partition_bytes: int = 64, *, find_unused: bool = False
) -> Plan:
    """Slots p0, p1, ... in this order."""
    slots = [Slot(f"p{number}", parameter) for number, parameter in enumerate(wanted)]
    return Plan(slots, partition_bytes=partition_bytes, find_unused=find_unused)
