"""Which chains of layers can be cut, and where: the longest stage is as short as it can be."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from time import perf_counter
from typing import Final

import torch
from torch import Tensor, nn

from bytesched.errors import PluginError
from bytesched.pipeline.stages import partition

from ..burst.record import timed
from ..c10d.grouping import has_groups
from ..routes.group import Group

log = logging.getLogger("bytesched")

_PROBE_BYTES: Final = 4 * 2**20
#: how often the weights of a stage cross a link in a step, gradients included
_CROSSINGS: Final = 3
#: passes of each layer that are timed
_REPEATS: Final = 2


def refuse_uncuttable(model: nn.Sequential, optimizer: torch.optim.Optimizer, ranks: int) -> None:
    """Raises PluginError for a chain that cannot travel in stages."""
    if not isinstance(model, nn.Sequential) or len(model) < ranks:
        raise PluginError(
            f"the model is cut into {ranks} stages: it has to be an nn.Sequential of at least "
            "so many layers"
        )
    if has_groups(model, {}):
        raise PluginError(
            "layers of the model have a data_parallel_group: waves have no groups of ranks"
        )
    elsewhere = {str(p.device) for p in model.parameters() if p.device.type != "cpu"}
    if elsewhere:
        raise PluginError(
            f"the model is on {', '.join(sorted(elsewhere))}: stages travel between hosts' "
            "memories over Gloo, so it has to be on the CPU"
        )
    held = {id(parameter) for parameter in model.parameters()}
    strangers = [
        tuple(parameter.shape)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) not in held
    ]
    if strangers:
        raise PluginError(
            f"the optimizer has {len(strangers)} parameters that the model has not, of shapes "
            f"{strangers}: nothing would update them; give them an optimizer of their own"
        )
    seen: dict[int, str] = {}
    for name, layer in model._modules.items():
        assert layer is not None
        for parameter in layer.parameters():
            other = seen.setdefault(id(parameter), name)
            if other != name:
                raise PluginError(
                    f"layers {other} and {name} share a parameter, and may be in different stages"
                )


def layer_times_s(layers: Sequence[nn.Module], inputs: Tensor) -> list[float]:
    """Seconds of forward and backward of each layer on ``inputs``, median of a few.

    Copies are timed, so that neither statistics nor random numbers change.
    """
    times_s = []
    x = inputs.detach()
    with torch.random.fork_rng():
        for layer in layers:
            forward_ms, backward_ms, x = timed(copy.deepcopy(layer), x, _REPEATS)
            times_s.append((forward_ms + backward_ms) / 1e3)
    return times_s


def cut(group: Group, model: nn.Sequential, inputs: Tensor) -> list[int]:
    """The bounds of the stages, as rank 0 has measured and computed them."""
    layers = list(model)
    sizes = [sum(p.nbytes for p in layer.parameters()) for layer in layers]
    probe = torch.zeros(_PROBE_BYTES // 4)
    group.wait(group.all_reduce(probe), task="connecting")
    began_s = perf_counter()
    group.wait(group.all_reduce(probe), task="measuring the link")
    bytes_per_s = 2 * (group.size - 1) / group.size * _PROBE_BYTES / (perf_counter() - began_s)
    times_s = layer_times_s(layers, inputs)

    def cost(start: int, stop: int) -> float:
        """Seconds for which a stage keeps a rank busy, or a link."""
        if not sum(sizes[start:stop]):
            return float("inf")
        sent_s = _CROSSINGS * sum(sizes[start:stop]) / bytes_per_s
        return max(sum(times_s[start:stop]), sent_s)

    bounds = torch.tensor(partition(len(layers), group.size, cost))
    group.broadcast([bounds], task="the cut of the model")
    if group.rank == 0:
        log.info("%d layers in %d stages, cut at %s", len(layers), group.size, bounds.tolist())
    return [int(bound) for bound in bounds]
