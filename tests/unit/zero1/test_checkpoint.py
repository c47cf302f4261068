"""A range of a tensor's memory is a few boxes, as a checkpoint of shards wants them."""

from __future__ import annotations

from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from bytesched.plugins.zero1.checkpoint import boxes_of

SHAPES = st.lists(st.integers(1, 6), max_size=4)


@given(SHAPES, st.data())
def test_boxes_are_the_elements_of_a_range_in_their_order(
    shape: list[int], data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, prod(shape)))
    stop = data.draw(st.integers(start, prod(shape)))
    numbers = torch.arange(prod(shape)).view(shape)
    boxes = list(boxes_of(shape, start, stop))
    found = [
        numbers[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))].flatten()
        for offsets, sizes in boxes
    ]
    assert torch.cat([torch.arange(0), *found]).tolist() == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
