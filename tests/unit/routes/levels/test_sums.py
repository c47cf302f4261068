"""Sums in two levels: the same bits on all ranks, in one order, and an end for each of them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from connected import connected, two_level_sums
from together import together

from bytesched.errors import PeerLost, TransportError
from bytesched.plugins.planned.buckets import uses
from bytesched.plugins.routes import levels as module
from bytesched.plugins.routes.levels import TwoLevelSums

LIMIT = timedelta(seconds=100)


def values(rank: int, count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(100 * rank + count))


def close_all(found: list[TwoLevelSums]) -> None:
    def close(rank: int) -> None:
        for group in found[rank].groups:
            group.close()

    together(close, len(found))


@pytest.fixture
def found() -> Iterator[list[TwoLevelSums]]:
    """Those of two ranks on each of two hosts."""
    found = two_level_sums(2, 2)
    yield found
    close_all(found)


@pytest.mark.parametrize(("hosts", "each"), [(2, 2), (2, 3), (3, 2)])
def test_all_ranks_have_the_same_sum(hosts: int, each: int) -> None:
    """Of several sums under way, more than begin at once, some smaller than a host has ranks."""
    found = two_level_sums(hosts, each)
    counts = [1, 2, 5, 64, 129, *range(1000, 1000 + 2 * module._WINDOW)]

    def on(rank: int) -> list[torch.Tensor]:
        tensors = [values(rank, count) for count in counts]
        tensors[3] = tensors[3].view(8, 8)
        works = [found[rank].start(tensor) for tensor in tensors]
        for work in works:
            work.wait(LIMIT)
        return tensors

    ranks = hosts * each
    made = together(on, ranks)
    for position, count in enumerate(counts):
        of_hosts = []
        for host in range(hosts):
            total = values(host * each, count)
            for place in range(1, each):
                total = total + values(host * each + place, count)
            of_hosts.append(total)
        for tensors in made:
            assert torch.equal(tensors[position], made[0][position])
            torch.testing.assert_close(tensors[position].view(-1), torch.stack(of_hosts).sum(0))
        if hosts == 2:
            # In the order of the ranks on a host; two numbers have one sum.
            assert torch.equal(made[0][position].view(-1), of_hosts[0] + of_hosts[1])
    close_all(found)


def test_numbers_of_all_kinds_are_added_up(found: list[TwoLevelSums]) -> None:
    kinds = [torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.int64]

    def on(rank: int) -> list[torch.Tensor]:
        tensors = [torch.full((3,), rank + 1, dtype=kind) for kind in kinds]
        for work in [found[rank].start(tensor) for tensor in tensors]:
            work.wait(LIMIT)
        return tensors

    for tensors in together(on, 4):
        assert [tensor.tolist() for tensor in tensors] == [[10] * 3] * len(kinds)


@pytest.mark.parametrize("step", range(3), ids=["gathering", "between", "spreading"])
def test_a_rank_that_is_gone_is_named_in_whatever_step(
    found: list[TwoLevelSums], step: int
) -> None:
    data = connected(4)
    data[3].abort()
    for group in found[3].groups[step:]:
        group.abort()

    def on(rank: int) -> TransportError | None:
        work = found[rank].start(torch.ones(8))
        try:
            data[rank].wait(work, task="chunk")
        except TransportError as error:
            # As a session does.
            for group in found[rank].groups:
                group.abort()
            return error
        return None

    # Those of the other host may have their sums by then.
    errors = together(on, 4)
    assert [error.task for error in errors[2:]] == ["chunk"] * 2
    assert isinstance(errors[2], PeerLost)
    assert errors[2].peers == (3,)
    together(lambda rank: data[rank].close(), 4)


class Step:
    """A group of two ranks whose operations a test ends; the other rank has what this one has."""

    size, rank = 2, 0

    def __init__(self) -> None:
        #: what was begun, by the number in it, and what ends it
        self.begun: list[tuple[float, torch.futures.Future[None]]] = []

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        return self._begin(tensor)

    def all_to_all(self, into: torch.Tensor, sent: torch.Tensor, *sizes: Any) -> Any:
        into.copy_(sent)
        return self._begin(sent)

    def _begin(self, tensor: torch.Tensor) -> Any:
        future: torch.futures.Future[None] = torch.futures.Future()
        self.begun.append((tensor[0].item(), future))
        return SimpleNamespace(get_future=lambda: future)

    @property
    def order(self) -> list[float]:
        return [number for number, _ in self.begun]

    def end(self, *numbers: float) -> None:
        for number in numbers:
            dict(self.begun)[number].set_result(None)


def steps() -> tuple[TwoLevelSums, Step, Step, Step]:
    gathering, between, spreading = Step(), Step(), Step()
    groups: Any = gathering, between, spreading
    return TwoLevelSums(*groups), gathering, between, spreading


def test_each_step_has_the_order_of_the_first_one() -> None:
    sums, gathering, between, spreading = steps()
    works = [sums.start(torch.full((2,), number)) for number in (1.0, 2.0, 3.0)]
    assert gathering.order == [1, 2, 3]
    gathering.end(3, 2)
    assert not between.begun
    gathering.end(1)
    # What two ranks have is added up.
    assert between.order == [2, 4, 6]
    between.end(4)
    assert not spreading.begun
    between.end(2)
    assert spreading.order == [2, 4]
    spreading.end(4)
    assert [work.is_completed() for work in works] == [False, True, False]
    between.end(6)
    spreading.end(6, 2)
    for work in works:
        work.wait(LIMIT)


def test_behind_one_that_failed_nothing_begins() -> None:
    """Another rank would take it for the one that failed."""
    sums, gathering, between, spreading = steps()
    works = [sums.start(torch.full((2,), number)) for number in (1.0, 2.0, 3.0)]
    gathering.end(1, 3)
    dict(gathering.begun)[2].set_exception(RuntimeError("broken"))  # type: ignore[arg-type]
    assert between.order == [2]
    assert [work.is_completed() for work in works] == [False, True, True]
    between.end(2)
    assert not spreading.begun
    works += [sums.start(torch.ones(2)) for _ in range(2 * module._WINDOW)]
    assert len(gathering.begun) == 3
    for work in works:
        with pytest.raises(RuntimeError, match="broken"):
            work.wait(LIMIT)
        with pytest.raises(RuntimeError, match="broken"):
            work.get_future().wait()


def test_what_cannot_begin_fails() -> None:
    sums, gathering, between, _ = steps()
    work = sums.start(torch.ones(2))
    between.all_reduce = None  # type: ignore[assignment, method-assign]
    gathering.end(1)
    with pytest.raises(RuntimeError, match="not callable"):
        work.wait(LIMIT)


def test_only_so_many_need_memory_at_a_time() -> None:
    sums, gathering, between, spreading = steps()
    numbers = [float(number) for number in range(module._WINDOW + 2)]
    for number in numbers:
        sums.start(torch.full((2,), number))
    assert gathering.order == numbers[:-2]
    gathering.end(0, 1)
    between.end(0, 2)
    spreading.end(2)
    assert gathering.order == numbers[:-1]
    spreading.end(0)
    assert gathering.order == numbers


def test_what_waits_for_it_comes_after_what_is_told_of_it() -> None:
    sums, gathering, between, spreading = steps()
    work = sums.start(torch.ones(2))
    with pytest.raises(RuntimeError, match="timed out"):
        work.wait(timedelta(milliseconds=1))
    told: list[bool] = []
    work.get_future().add_done_callback(lambda _: told.append(work.is_completed()))
    gathering.end(1)
    between.end(2)
    spreading.end(2)
    work.wait(LIMIT)
    assert told == [False]


def test_a_script_sees_no_tensor_of_ours_over_the_memory() -> None:
    """Where a gradient lies in the memory, it would be taken for one of the script's."""
    sums, gathering, between, spreading = steps()
    tensor = torch.ones(4)
    before = uses(tensor)
    sums.start(tensor)
    for step, number in (gathering, 1.0), (between, 2.0), (spreading, 2.0):
        assert uses(tensor) == before
        step.end(number)
    assert uses(tensor) == before
