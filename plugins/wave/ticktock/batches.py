"""One batch as the batches of several waves."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from bytesched.errors import PluginError


def of_waves(batches: Sequence[Any], waves: int) -> tuple[list[Any], list[float]]:
    """The batch of every wave, and the share of its loss in that of the step.

    One batch is split along the first dimension of all tensors in it; the share of a part is
    its share of the samples. As many batches as waves are taken as they are, with equal shares.
    """
    if len(batches) == waves:
        return list(batches), [1 / waves] * waves
    if len(batches) != 1:
        raise PluginError(f"got {len(batches)} batches for {waves} waves: pass one, or {waves}")
    (batch,) = batches
    samples = _samples(batch)
    if len(samples) != 1:
        raise PluginError(
            f"the first dimensions of the batch are {sorted(samples) or 'missing'}: one that is to "
            f"be split has the same in all its tensors; or pass {waves} batches, one for each wave"
        )
    (size,) = samples
    if size < waves:
        raise PluginError(f"a batch of {size} has nothing for {waves} waves")
    cuts = [size * wave // waves for wave in range(waves + 1)]
    parts = list(pairwise(cuts))
    return [_part(batch, *part) for part in parts], [(stop - start) / size for start, stop in parts]


def _samples(batch: Any) -> set[int]:
    """The sizes of the first dimension of all tensors in ``batch``."""
    if isinstance(batch, torch.Tensor):
        return {batch.shape[0]} if batch.dim() else set()
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        return {size for item in batch for size in _samples(item)}
    return set()


def _part(batch: Any, start: int, stop: int) -> Any:
    """The samples from ``start`` to ``stop`` of every tensor; all else as it is."""
    if isinstance(batch, torch.Tensor):
        return batch[start:stop] if batch.dim() else batch
    if isinstance(batch, dict):
        return type(batch)((key, _part(item, start, stop)) for key, item in batch.items())
    if isinstance(batch, (list, tuple)):
        items = [_part(item, start, stop) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    return batch
