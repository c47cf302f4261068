"""Where buckets are cut."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from bytesched.plugins.planned.cutting import Cut, cut_dealt, cut_whole
from bytesched.plugins.planned.owners import Way


@given(st.integers(1, 10_000), st.sampled_from([2, 4, 8]), st.integers(1, 50_000))
def test_parts_are_alike_and_of_about_the_size(
    numel: int, element_bytes: int, chunk_bytes: int
) -> None:
    kind = {2: torch.float16, 4: torch.float32, 8: torch.float64}[element_bytes]
    cuts = cut_whole([], [], torch.empty(numel, dtype=kind), chunk_bytes=chunk_bytes)
    ends = [cut.end for cut in cuts]
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    assert sum(sizes) == ends[-1] == numel
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    mean_bytes = numel * element_bytes / len(sizes)
    assert mean_bytes <= 1.5 * chunk_bytes or len(sizes) == numel
    assert mean_bytes >= chunk_bytes / 1.5 or len(sizes) == 1


def test_without_a_size_there_is_one_chunk() -> None:
    assert cut_whole([], [], torch.empty(1000), chunk_bytes=0) == [Cut(1000)]
    cuts = cut_whole([], [], torch.empty(1000), chunk_bytes=1000)
    assert [cut.end for cut in cuts] == [250, 500, 750, 1000]


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 200), st.integers(0, 1)),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 100),
)
def test_each_element_goes_its_way(gradients: list[tuple[int, int, int]], chunk_bytes: int) -> None:
    parameters = [torch.empty(numel) for numel, *_ in gradients]
    ways = {
        id(parameter): Way(whole_bytes, owner)
        for parameter, (_, whole_bytes, owner) in zip(parameters, gradients, strict=True)
    }
    expected: list[int | None] = []
    starts = []
    for numel, whole_bytes, owner in gradients:
        starts.append(len(expected))
        expected += [None if 4 * at + 4 <= whole_bytes else owner for at in range(numel)]
    cuts = cut_dealt(
        parameters, starts, torch.empty(len(expected)), ways=ways, chunk_bytes=chunk_bytes
    )
    found: list[int | None] = []
    for start, cut in zip([0, *(cut.end for cut in cuts)], cuts, strict=False):
        assert start < cut.end
        found += [cut.owner] * (cut.end - start)
    assert found == expected


def test_neighbours_on_one_way_are_cut_as_if_they_were_one() -> None:
    parameters = [torch.empty(3), torch.empty(3), torch.empty(6)]
    ways = {id(one): Way(0, owner) for one, owner in zip(parameters, (0, 0, 1), strict=True)}
    cuts = cut_dealt(parameters, [0, 3, 6], torch.empty(12), ways=ways, chunk_bytes=12)
    assert cuts == [Cut(3, 0), Cut(6, 0), Cut(9, 1), Cut(12, 1)]
    cuts = cut_dealt(parameters, [0, 3, 6], torch.empty(12), ways=ways, chunk_bytes=100)
    assert cuts == [Cut(6, 0), Cut(12, 1)]


def test_numbers_of_two_parts_and_what_nobody_was_asked_about_go_whole() -> None:
    parameter, other = torch.empty(4), torch.empty(4)
    ways = {id(parameter): Way(0, 1)}
    of_complex = torch.empty(4, dtype=torch.complex64)
    assert cut_dealt([parameter], [0], of_complex, ways=ways, chunk_bytes=0) == [Cut(4)]
    assert cut_dealt([other], [0], torch.empty(4), ways=ways, chunk_bytes=0) == [Cut(4)]
    assert cut_dealt([parameter], [0], torch.empty(4), ways=ways, chunk_bytes=0) == [Cut(4, 1)]
