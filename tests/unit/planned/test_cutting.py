"""Where buckets are cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bytesched.plugins.planned.cutting import ends_of


@given(st.integers(1, 10_000), st.sampled_from([2, 4, 8]), st.integers(1, 50_000))
def test_parts_are_alike_and_of_about_the_size(
    numel: int, element_bytes: int, chunk_bytes: int
) -> None:
    ends = list(ends_of(numel, element_bytes, chunk_bytes=chunk_bytes))
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    assert sum(sizes) == ends[-1] == numel
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    mean_bytes = numel * element_bytes / len(sizes)
    assert mean_bytes <= 1.5 * chunk_bytes or len(sizes) == numel
    assert mean_bytes >= chunk_bytes / 1.5 or len(sizes) == 1


def test_without_a_size_there_is_one_chunk() -> None:
    assert list(ends_of(1000, 4, chunk_bytes=0)) == [1000]
    assert list(ends_of(1000, 4, chunk_bytes=1000)) == [250, 500, 750, 1000]
