"""What ranks of mixture of experts are told when they differ, and what they may differ in."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from moe_cases import EXPERTS, WIDTH, batch_of, gate_of, layer_of
from torch import Tensor, nn

from bytesched.errors import MismatchError
from bytesched.plugins import moe
from bytesched.plugins.moe.peers import peers_of


class Half(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.bfloat16()


class Narrow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, 1:]


class Raising(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("not today")


def own_expert(last: nn.Module) -> moe.MoE:
    """A layer of an expert a rank, which copies; ``last`` is that of the last rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    return moe.MoE(moe.TopKGate(WIDTH, size), [last if rank == size - 1 else nn.Identity()])


def told(call: Callable[[], Any]) -> str:
    try:
        call()
    except (MismatchError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def experts_that_fail() -> list[str]:
    """What ranks are told of experts of the last one, and whether a good layer goes on."""
    x = torch.randn(9, WIDTH)
    return [told(partial(own_expert(last), x)) for last in (Narrow(), Raising(), nn.Identity())]


def another_dtype_of_one_rank() -> bool:
    """Whether results of an expert in 16 bits arrive as such, in the tokens' dtype."""
    rank = dist.get_rank()
    layer = own_expert(Half())
    torch.manual_seed(rank)
    x = torch.randn(9, WIDTH)
    y = layer(x)
    keep, weight = layer.gate(x).keep, layer.gate(x).weight.sum(dim=1, keepdim=True)
    made = torch.where(keep[:, -1:], x.bfloat16().float(), x)
    return y.dtype is x.dtype and torch.equal(y, made * weight)


def layers_in_another_order() -> list[str]:
    """What ranks are told where the last one is in another layer than the others, or skips it."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    few, many, same = (
        moe.MoE(
            moe.TopKGate(WIDTH, experts),
            [nn.Identity() for _ in moe.own_experts(experts)],
        )
        for experts in (8, 64, 64)
    )
    x = torch.randn(9, WIDTH)
    found = [
        told(lambda: (few if is_last else many)(x)),
        told(lambda: (same if is_last else many)(x)),
        told(
            lambda: (
                moe.exchange(x[:0], [0] * dist.get_world_size(), [0] * dist.get_world_size())
                if is_last
                else few(x)
            )
        ),
    ]
    other = own_experts_of(16 if is_last else 8)
    return [
        *(line.replace(f"layer {few._number}", "layer A") for line in found),
        told(lambda: other(x)),
        told(lambda: many(x)),
    ]


def own_experts_of(experts: int) -> moe.MoE:
    return moe.MoE(moe.TopKGate(WIDTH, experts), [nn.Identity() for _ in moe.own_experts(experts)])


def infers() -> bool:
    """Whether rows arrive in inference mode, also those that another thread begins to send."""
    rank, size = dist.get_rank(), dist.get_world_size()
    peers = peers_of(None)
    assert peers is not None
    with torch.inference_mode():
        x = torch.full((size, 1 << 20), float(rank))
        once = [1] * size
        # Each is more than the credit, so that the next one waits for its end.
        begun = [peers.start(x, once, once, "x", is_urgent=False) for _ in range(3)]
        arrived = [transfer.wait()[:, 0].tolist() for transfer in begun]
    return arrived == [list(range(size))] * 3


def frozen_on_one_rank() -> tuple[bool, str]:
    """Whether trained experts get the same gradients beside frozen ones; and of no gradients."""
    rank = dist.get_rank()
    found = []
    for is_frozen in (False, True):
        layer = layer_of(gate_of("top2"), own=True)
        layer.gate.requires_grad_(False)
        if is_frozen and rank == 0:
            layer.experts.requires_grad_(False)
        (layer(batch_of(rank)) ** 2).sum().backward()
        found.append([p.grad for p in layer.experts.parameters()])
    equal = rank == 0 or all(
        one is not None and other is not None and torch.equal(one, other)
        for one, other in zip(*found, strict=True)
    )
    layer = layer_of(gate_of("top2"), own=True)
    with torch.set_grad_enabled(rank == 0):
        return equal, told(lambda: layer(batch_of(rank)))


class Wide(moe.TopKGate):
    def forward(self, x: Tensor) -> Any:
        routing = super().forward(x)
        return routing._replace(weight=routing.weight.float())


def a_router_in_32_bits() -> bool:
    """Whether tokens keep their 16 bits."""
    gate = Wide(WIDTH, EXPERTS).bfloat16()
    layer = layer_of(gate, own=True)
    return bool(layer(batch_of(0).bfloat16()).dtype is torch.bfloat16)
