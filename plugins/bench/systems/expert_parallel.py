"""The systems that `bytesched bench` compares for models with layers of experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch.distributed as dist
from torch import nn

from bytesched.bench.systems import EXCHANGE_PIECES

from ...exchanges.peers import peers_of
from ..workloads.experts import EmulatedExperts, Exchanges, InPieces
from .data_parallel import Running, make_optimizer, set_up

__all__ = ["set_up_experts"]


def _on_its_own(*, is_urgent: bool) -> Exchanges:
    return Exchanges(dist.new_group(), is_urgent=is_urgent)


def _in_pieces() -> Exchanges:
    peers = peers_of(None)
    assert peers is not None
    return InPieces(peers, count=EXCHANGE_PIECES)


#: what carries all-to-alls, and the system that carries gradients; "" sends none
_SYSTEMS: dict[str, tuple[Callable[[], Exchanges], str]] = {
    "ddp": (lambda: Exchanges(None, is_urgent=False), "ddp"),
    "ddp-own-group": (lambda: _on_its_own(is_urgent=False), "ddp"),
    "bytesched-no-lane": (lambda: _on_its_own(is_urgent=False), "bytesched"),
    "bytesched": (lambda: _on_its_own(is_urgent=True), "bytesched"),
    "bytesched-pieces": (_in_pieces, "bytesched"),
    "idle": (lambda: _on_its_own(is_urgent=False), ""),
}


def set_up_experts(
    kind: str, options: Mapping[str, str], model: nn.Module, optimizer_name: str
) -> Running:
    """The system ``kind`` around ``model``, whose layers of experts exchange; collective."""
    make, carrier = _SYSTEMS[kind]
    exchanges = make()
    for module in model.modules():
        if isinstance(module, EmulatedExperts):
            module.exchanges = exchanges
    if carrier:
        running = set_up(carrier, options, model, optimizer_name)
    else:
        running = Running(model, make_optimizer(optimizer_name, model.parameters()))

    def close() -> dict[str, int | float | str]:
        figures = running.close()
        exchanges.close()
        return figures

    return replace(running, close=close, exchanges=exchanges)
