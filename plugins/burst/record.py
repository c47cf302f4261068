"""A model's graph, measured: what the planner plans with, for models with branches too."""

from __future__ import annotations

import copy
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from bytesched.errors import PluginError
from bytesched.files import write_text

from .structure import Branched

_REPEATS: Final = 5


def record(
    model: nn.Sequential, inputs: Tensor, path: str | Path, *, batches: Sequence[int] = ()
) -> None:
    """Times every layer on the CPU and writes the profile for `bytesched burst plan --profile`.

    Copies are timed, so that neither weights, statistics nor random numbers change. What joins
    branches is taken to cost nothing, as the planner has it.

    Args:
        model: layers in a row, some of which may be `Branched`.
        inputs: a batch like those to come, as large as the largest to be planned for.
        path: a .json file.
        batches: the sizes to measure; by default that of ``inputs``, its half, and so on to 1.

    Raises PluginError for a model that cannot be planned.
    """
    sizes = (
        sorted(set(batches)) or [len(inputs) >> n for n in range(len(inputs).bit_length())][::-1]
    )
    if not sizes or sizes[0] < 1 or sizes[-1] > len(inputs):
        raise PluginError(f"batch sizes {sizes}: from 1 to {len(inputs)}, which is what inputs has")
    if inputs.device.type != "cpu":
        raise PluginError(f"the inputs are on {inputs.device}: layers are timed on the CPU")
    with torch.random.fork_rng():
        layers, _ = _chain(model, [inputs[:size].detach() for size in sizes], "the model")
    content = {
        "name": Path(path).stem,
        "description": f"Recorded on the CPU, {torch.get_num_threads()} threads.",
        "batches": sizes,
        "layers": layers,
    }
    write_text(Path(path), json.dumps(content, indent=1) + "\n")


def _chain(
    chain: nn.Sequential, inputs: list[Tensor], where: str
) -> tuple[list[dict[str, Any]], list[Tensor]]:
    """The items of a chain, and what comes out of it for every batch size."""
    items: list[dict[str, Any]] = []
    for name, module in chain.named_children():
        if isinstance(module, Branched):
            if not items:
                raise PluginError(f"{where} begins with branches: it has to begin with a layer")
            found = [
                _chain(cast(nn.Sequential, branch), inputs, f"branch {index} of {name}")
                for index, branch in enumerate(module.branches)
            ]
            ends = zip(*(ends for _, ends in found), strict=True)
            inputs = [module.join(list(parts)) for parts in ends]
            item: dict[str, Any] = {"branches": [branch for branch, _ in found]}
        else:
            twin = copy.deepcopy(module)
            forward_ms, backward_ms, outputs = zip(*(timed(twin, x) for x in inputs), strict=True)
            inputs = list(outputs)
            item = {
                "forward_ms": [round(ms, 4) for ms in forward_ms],
                "backward_ms": [round(ms, 4) for ms in backward_ms],
                "parameter_bytes": sum(p.nbytes for p in module.parameters() if p.requires_grad),
            }
        items.append({"name": name, **item, "output_bytes": inputs[-1].nbytes // len(inputs[-1])})
    return items, inputs


def timed(layer: nn.Module, inputs: Tensor, repeats: int = _REPEATS) -> tuple[float, float, Tensor]:
    """Median milliseconds forward and backward, after a first time that does not count."""
    forward_ms, backward_ms = [], []
    for _ in range(1 + repeats):
        # Layers that work in place may overwrite neither a leaf nor the next input.
        x = inputs.detach().requires_grad_(inputs.is_floating_point()).clone()
        began_s = perf_counter()
        output = layer(x)
        turned_s = perf_counter()
        if output.requires_grad:
            output.backward(torch.ones_like(output))
        forward_ms.append(1e3 * (turned_s - began_s))
        backward_ms.append(1e3 * (perf_counter() - turned_s))
    medians = statistics.median(forward_ms[1:]), statistics.median(backward_ms[1:])
    return *medians, output.detach()
