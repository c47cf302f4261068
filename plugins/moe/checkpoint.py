"""Checkpoints: of all experts in one file, which any number of ranks can load."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..exchanges.peers import peers_of
from .gradients import layers

__all__ = ["full_state_dict"]


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """The ``state_dict()`` of one process that has all experts, on every rank; collective.

    ``load_state_dict`` of the model takes it on any number of ranks. For large models, save each
    rank's ``state_dict()`` in a file of its own instead: it loads on as many ranks, and the union
    of all files is this dictionary. States of optimizers belong to ranks; save each rank's own.
    """
    state = dict(model.state_dict())
    for name, layer in layers(model).items():
        if layer.numbers == range(layer.gate.experts):
            continue
        start = f"{name}.experts." if name else "experts."
        own = {key: state.pop(key) for key in list(state) if key.startswith(start)}
        peers = peers_of(layer.group)
        assert peers is not None
        state.update(peers.share(own, f"experts of {name or 'the layer'}"))
    return state
