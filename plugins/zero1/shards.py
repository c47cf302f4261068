"""What this rank updates of each parameter: all of it, none, or some of its elements."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from operator import not_
from typing import Any, TypeAlias

import torch
from torch import nn

from bytesched.errors import PluginError
from bytesched.task import CommTask

from ..layout.packing import elements
from ..layout.plan import Plan, Share
from ..layout.slots import Slot
from ..proxies.lazy_grads import plain

__all__ = ["Owned", "OwnedShards", "Part", "cut_entry", "whole_entry"]


class Part:
    """Some elements of a parameter, as a parameter of one dimension that an optimizer updates.

    Raises PluginError if the parameter's memory has gaps.
    """

    def __init__(self, slot: Slot, share: Share) -> None:
        self._slot = slot
        self.share = share
        self.parameter = slot.parameter
        #: those of the gradient
        self.view = elements(slot.view, slot.view, share.start_at, share.stop_at)
        self.realias()

    def realias(self) -> None:
        """Makes the alias anew, after the parameter got other memory."""
        memory = self.of(self._slot.alias.detach(), self.share.start_at, self.share.stop_at)
        self.alias = nn.Parameter(memory, self.parameter.requires_grad)
        self.alias.grad = self.view

    def of(self, tensor: torch.Tensor, start_at: int, stop_at: int) -> torch.Tensor:
        """Elements of a tensor of the parameter's shape and strides, no copy."""
        if tensor.stride() != self._slot.view.stride():
            raise PluginError(
                f"{self._slot.name!r} was given strides {tensor.stride()}, it had "
                f"{self._slot.view.stride()} when its update was dealt to several ranks: with "
                "shard=True, set memory formats before the first backward pass"
            )
        return elements(tensor, self._slot.view, start_at, stop_at)

    def grad_from_parameter(self) -> None:
        """Its gradient is what the script has as that of the parameter, until `grad_from_arena`."""
        assert self.parameter.grad is not None
        grad, share = plain(self.parameter.grad).detach(), self.share
        self.alias.grad = elements(grad, self._slot.view, share.start_at, share.stop_at)

    def grad_from_arena(self) -> None:
        """Its gradient is what was summed."""
        self.alias.grad = self.view

    def __repr__(self) -> str:
        return f"<Part {self._slot.name}[{self.share.start_at}:{self.share.stop_at}]>"


#: a whole parameter, or a part of it
Owned: TypeAlias = Slot | Part


class OwnedShards:
    """What of a plan that is cut for owners is this rank's, and what is not.

    Attributes:
        own: what this rank updates of a parameter, if anything.
        parts: that, where other ranks update other elements of it.
        foreign: of every parameter, what others update.
        chunks: of every parameter, those of its chunks whose owner is this rank.
        foreign_chunks: the others.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        self._rank = rank
        self.own: dict[Slot, Owned] = {}
        self.parts: dict[Slot, Part] = {}
        self.foreign: dict[Slot, list[Share]] = {}
        self.chunks: dict[Slot, list[CommTask]] = {}
        self.foreign_chunks: dict[Slot, list[CommTask]] = {}
        for slot in plan.slots:
            shares = plan.shares(slot)
            for share in shares:
                if share.rank == rank and len(shares) > 1:
                    self.own[slot] = self.parts[slot] = Part(slot, share)
                elif share.rank == rank:
                    self.own[slot] = slot
            self.foreign[slot] = [share for share in shares if share.rank != rank]
            mine = [plan.owners[chunk.index] == rank for chunk in slot.chunks]
            self.chunks[slot] = list(compress(slot.chunks, mine))
            self.foreign_chunks[slot] = list(compress(slot.chunks, map(not_, mine)))

    def __repr__(self) -> str:
        return (
            f"<OwnedShards rank {self._rank}, {len(self.own)} parameters, "
            f"{len(self.parts)} in part>"
        )


def cut_entry(entry: dict[str, Any], slot: Slot, share: Share) -> dict[str, Any]:
    """Of the state of a whole parameter, that of one part; of such a part, itself."""
    cut = dict(entry)
    for name, value in entry.items():
        if isinstance(value, torch.Tensor) and value.shape == slot.view.shape:
            cut[name] = elements(value, slot.view, share.start_at, share.stop_at).clone()
    return cut


def whole_entry(
    slot: Slot, shares: Sequence[Share], entries: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """The state of a whole parameter, from those of its parts, in their order."""
    if len(shares) == 1:
        return entries[0]
    whole = dict(entries[0])
    for name, value in entries[0].items():
        if isinstance(value, torch.Tensor) and value.shape == (
            shares[0].stop_at - shares[0].start_at,
        ):
            whole[name] = torch.empty_like(slot.view, dtype=value.dtype, device=value.device)
            flat = elements(whole[name], slot.view, 0, slot.view.numel())
            torch.cat([entry[name] for entry in entries], out=flat)
    return whole
