"""Optimizer state between a checkpoint, which has it by parameter, and a store, by chunk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bytesched.errors import PluginError

from ...planned.buckets import Bucket, Chunk, Member
from ...update.surroundings import snapshot

__all__ = [
    "Piece",
    "gathered_state",
    "hyperparameters_of",
    "pieces_of",
    "scatter_state",
]


@dataclass(eq=False)
class Piece:
    """What one key of the store stands for."""

    chunk: Chunk
    #: parameters in it, each from one element to another in the order of its memory
    slices: list[tuple[Member, int, int]]
    key: str = ""


def pieces_of(bucket: Bucket) -> Iterator[Piece]:
    """One for each chunk."""
    stop = 0
    for chunk in bucket.chunks:
        start, stop = stop, stop + chunk.sent.numel()
        slices = []
        begin = 0
        for member in bucket.members:
            end = begin + member.view.numel()
            if max(start, begin) < min(stop, end):
                slices.append((member, max(start, begin) - begin, min(stop, end) - begin))
            begin = end
        yield Piece(chunk, slices)


def gathered_state(store: Any, pieces: Iterable[Piece]) -> dict[nn.Parameter, dict[str, Any]]:
    """The store's state of every parameter, as torch.optim has it."""
    entries: dict[nn.Parameter, dict[str, Any]] = {}
    for piece in pieces:
        size = piece.chunk.sent.numel()
        state = store.get_state(piece.key)
        del state["value"]
        at = 0
        for member, start, stop in piece.slices:
            entry = entries.setdefault(member.parameter, {})
            for name, tensor in state.items():
                if tensor.numel() != size or tensor.dim() == 0:
                    entry[name] = tensor.clone()
                    continue
                if name not in entry:
                    entry[name] = torch.empty_like(member.view, dtype=tensor.dtype)
                _flat(entry[name])[start:stop] = tensor[at : at + stop - start]
            at += stop - start
    return entries


def scatter_state(
    store: Any, pieces: Iterable[Piece], state: Mapping[Any, Mapping[str, Any]]
) -> None:
    """Gives the store the values of worker 0, and what there is of ``state``; collective."""
    for piece in pieces:
        entries = {"value": _joined(piece, [member.parameter for member, *_ in piece.slices])}
        leading = piece.slices[0][0]
        for name, first in state.get(leading.parameter, {}).items():
            first = torch.as_tensor(first)
            if first.dim() == 0 or first.numel() != leading.view.numel():
                entries[name] = first
            else:
                entries[name] = _joined(
                    piece, [state[member.parameter][name] for member, *_ in piece.slices]
                )
        store.set_state(piece.key, entries)


def _joined(piece: Piece, values: Iterable[Any]) -> torch.Tensor:
    """One for each parameter in a piece, in the order of its memory."""
    parts = []
    for (member, start, stop), value in zip(piece.slices, values, strict=True):
        given = torch.as_tensor(value).detach()
        same = torch.empty_like(member.view, dtype=given.dtype).copy_(given)
        parts.append(_flat(same)[start:stop])
    return torch.cat(parts)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def hyperparameters_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Those of all parameters; PluginError if its groups differ."""
    groups = [snapshot(group) for group in optimizer.param_groups]
    if any(group != groups[0] for group in groups):
        raise PluginError(
            "parameter groups with different settings: a store that updates has one for all"
        )
    # What a learning-rate scheduler keeps in the group is its own.
    return {key: _as_json(value) for key, value in groups[0].items() if key != "initial_lr"}


def _as_json(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value
