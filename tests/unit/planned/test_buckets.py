"""Buckets: their chunks, the gradients that wait for them, and where they are cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from bytesched.plugins.planned.buckets import Bucket, Member
from bytesched.plugins.planned.cutting import Cut, Way, cut_dealt, cut_whole


class Sums:
    """Lands what is asked for: the sum is twice what is in the bucket."""

    settled = False

    def answer(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return NotImplemented

    def settle(self, member: Member) -> None:
        self.settled = True
        member.bucket.buffer.mul_(2.0)
        member.bucket.hand_back()


def bucket_of(
    *parameters: nn.Parameter,
    holds_gradients: bool = False,
    ends: Sequence[int] | None = None,
    first: int = 0,
    names: Sequence[str] = "abcdefgh",
) -> Bucket:
    """Filled with 1, 2, 3, ..., a number for each parameter, and gradients as DDP leaves them."""
    numels = [parameter.numel() for parameter in parameters]
    buffer = torch.cat([torch.full((numel,), 1.0 + i) for i, numel in enumerate(numels)])
    views = list(buffer.split(numels))
    bucket = Bucket(
        *(Sums(), buffer, parameters, views),
        {id(parameter): name for parameter, name in zip(parameters, names, strict=False)},
        holds_gradients=holds_gradients,
        cut=lambda _, __, memory: list(map(Cut, [memory.numel()] if ends is None else ends)),
        first=first,
    )
    bucket.is_under_way = True
    for parameter, member in zip(parameters, bucket.members, strict=True):
        parameter.grad = member.view if holds_gradients else member.view.clone()
        member.hand_out(parameter.grad)
    return bucket


def parameters_of(*numels: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(numel)) for numel in numels]


# -- chunks ----------------------------------------------------------------------------


@given(st.data(), st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 5))
def test_chunks_are_all_of_the_bucket_and_members_know_theirs(
    data: st.DataObject, numels: list[int], first: int
) -> None:
    numel = sum(numels)
    inner = data.draw(st.sets(st.integers(1, numel - 1)) if numel > 1 else st.just(set()))
    bucket = bucket_of(*parameters_of(*numels), ends=[*sorted(inner), numel], first=first)
    assert [chunk.index for chunk in bucket.chunks] == [first + i for i in range(len(inner) + 1)]
    assert torch.equal(torch.cat([chunk.sent for chunk in bucket.chunks]), bucket.buffer)
    for member in bucket.members:
        mine = set(range(member.view.data_ptr(), member.view.data_ptr() + member.view.nbytes, 4))
        for chunk in bucket.chunks:
            sent = chunk.sent
            theirs = set(range(sent.data_ptr(), sent.data_ptr() + sent.nbytes, 4))
            assert (chunk in member.chunks) == bool(mine & theirs)


def test_a_chunk_is_named_by_its_parameters() -> None:
    several = bucket_of(*parameters_of(2, 2), ends=[1, 4], first=3).chunks
    assert [chunk.name for chunk in several] == ["a..b 1/2", "a..b 2/2"]
    assert bucket_of(*parameters_of(2), names=()).chunks[0].name == "a parameter"


# -- gradients -------------------------------------------------------------------------


ZERO: dict[str, Callable[[Tensor], object]] = {
    "zero_": lambda grad: grad.zero_(),
    "foreach": lambda grad: torch._foreach_zero_([grad]),
}


@pytest.mark.parametrize("zero", ZERO)
@pytest.mark.parametrize(
    ("holds_gradients", "is_taken", "waits"),
    [(False, False, True), (False, True, False), (True, False, True), (True, True, True)],
)
def test_zeroing_waits_unless_an_update_reads_the_sum_elsewhere(
    holds_gradients: bool, is_taken: bool, waits: bool, zero: str
) -> None:
    [parameter] = parameters_of(2)
    bucket = bucket_of(parameter, holds_gradients=holds_gradients)
    [member] = bucket.members
    member.taken = is_taken
    grad: Any = parameter.grad
    ZERO[zero](grad)
    assert bucket.sums.settled is waits  # type: ignore[attr-defined]
    assert type(grad) is Tensor
    if not waits:
        assert member.view.tolist() == [1.0] * 2
        bucket.hand_back()
    assert grad.tolist() == [0.0] * 2


def test_a_gradient_of_another_class_gets_the_sum_and_keeps_its_class() -> None:
    class Own(torch.Tensor):
        pass

    [parameter] = parameters_of(2)
    bucket = bucket_of(parameter)
    own: Any = torch.zeros(2).as_subclass(Own)
    bucket.members[0].hand_out(own)
    assert type(own) is Own
    bucket.hand_back()
    assert own.tolist() == [1.0] * 2
    assert type(own) is Own


def test_a_gradient_that_was_handed_back_is_not_written_by_later_sums() -> None:
    [parameter] = parameters_of(2)
    bucket = bucket_of(parameter)
    for sums in (1.0, 9.0):
        bucket.buffer.fill_(sums)
        bucket.hand_back()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [1.0] * 2


# -- where they are cut ----------------------------------------------------------------


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
