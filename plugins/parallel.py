"""Plans of tensor parallelism of `bytesched.ir`, for `parallelize_module` of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bytesched.errors import ConfigError
from bytesched.values import nearest


def parallel_styles(plan: Mapping[str, str]) -> dict[str, Any]:
    """What `parallelize_module` takes, from a plan of `bytesched.ir.lower.tensor_plan`.

    Raises `ConfigError` for a style that is not known.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    styles: dict[str, Callable[[], Any]] = {
        "colwise": ColwiseParallel,
        "colwise_gathered": lambda: ColwiseParallel(output_layouts=Replicate()),
        "rowwise": RowwiseParallel,
    }
    for layer, style in plan.items():
        if style not in styles:
            raise ConfigError(f"layer {layer!r}: no style {style!r}{nearest(style, styles)}")
    return {layer: styles[style]() for layer, style in plan.items()}
