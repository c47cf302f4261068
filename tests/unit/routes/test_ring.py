"""Memory that is taken and given back in one order."""

from __future__ import annotations

from collections import deque

import torch
from hypothesis import given
from hypothesis import strategies as st

from bytesched.plugins.routes.split.ring import ALIGNED_BYTES, Ring

_DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int32])


@given(
    taken=st.lists(st.tuples(st.integers(1, 200), _DTYPES, st.booleans()), max_size=60),
    count=st.integers(1, 3),
    size=st.integers(1, 64),
)
def test_parts_never_overlap_and_keep_what_was_written(
    taken: list[tuple[int, torch.dtype, bool]], count: int, size: int
) -> None:
    ring = Ring(size * ALIGNED_BYTES)
    held: deque[tuple[int, list[torch.Tensor]]] = deque()
    for number, (n, dtype, gives_back) in enumerate(taken):
        if held and gives_back:
            written, parts = held.popleft()
            assert all((part == written).all() for part in parts)
            ring.give_back()
        like = torch.empty(n, dtype=dtype)
        found = ring.take(like, count)
        if found is None:
            continue
        assert [part.shape for part in found] == [like.shape] * count
        assert all(part.dtype is dtype for part in found)
        for part in found:
            part.fill_(number)
        held.append((number, found))
    for written, parts in held:
        assert all((part == written).all() for part in parts)


def test_a_ring_that_nothing_is_taken_of_has_room_for_all_of_it() -> None:
    ring = Ring(4 * ALIGNED_BYTES)
    like = torch.empty(ALIGNED_BYTES // 4)
    for _ in range(3):
        assert ring.take(like, 3) is not None
        assert ring.take(like, 2) is None
        assert ring.take(like, 1) is not None
        assert ring.take(like, 1) is None
        ring.give_back()
        ring.give_back()


def test_small_parts_take_what_they_need() -> None:
    ring = Ring(8 * ALIGNED_BYTES)
    small, large = torch.empty(1), torch.empty(ALIGNED_BYTES)
    assert ring.take(large, 1) is not None
    assert [ring.take(small, 1) is not None for _ in range(5)] == [True] * 4 + [False]
    ring.give_back()
    assert ring.take(large, 1) is not None
