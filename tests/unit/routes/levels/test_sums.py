"""Sums in two levels: the same bits on all ranks, in one order, and an end for each of them."""

from __future__ import annotations

import threading

import pytest
import torch
from backends import two_level_sums
from together import together

from bytesched.errors import SchedulerClosed, SchedulerTimeout, TransportError
from bytesched.plugins.routes.levels.sums import PendingSum, TwoLevelSums

LIMIT_S = 100.0


def values(rank: int, count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(100 * rank + count))


def begin(sums: TwoLevelSums, tensor: torch.Tensor, task: str = "t") -> PendingSum:
    under = PendingSum(LIMIT_S)
    sums.begin(tensor, task, under.ended)
    return under


def close_all(found: list[TwoLevelSums]) -> None:
    together(lambda rank: found[rank].close(), len(found))
    names = {thread.name for thread in threading.enumerate()}
    assert not names & {"bytesched-gathering", "bytesched-between", "bytesched-spreading"}


@pytest.mark.parametrize(("hosts", "each"), [(2, 2), (2, 3), (3, 2)])
def test_all_ranks_have_the_same_sum(hosts: int, each: int) -> None:
    """Of several sums under way, some smaller than a host has ranks."""
    found = two_level_sums(hosts, each)
    counts = [1, 2, 5, 64, 129]

    def on(rank: int) -> list[torch.Tensor]:
        tensors = [values(rank, count) for count in counts]
        works = [begin(found[rank], tensor) for tensor in tensors]
        for work in works:
            work.wait()
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
            torch.testing.assert_close(tensors[position], torch.stack(of_hosts).sum(0))
        if hosts == 2:
            # In the order of the ranks on a host; two numbers have one sum.
            assert torch.equal(made[0][position], of_hosts[0] + of_hosts[1])
    close_all(found)


@pytest.mark.parametrize("step", range(3), ids=["gathering", "between", "spreading"])
def test_a_rank_that_is_gone_is_named_in_whatever_step(step: int) -> None:
    found = two_level_sums(2, 2)
    for group in found[3].groups[step:]:
        group.abort()

    def on(rank: int) -> str:
        try:
            begin(found[rank], torch.ones(8), "chunk").wait()
        except TransportError as error:
            # As a session does.
            for group in found[rank].groups:
                group.abort()
            return error.task
        return ""

    # Those of the other host may have their sums by then.
    assert together(on, 4)[2:] == ["chunk"] * 2
    close_all(found)


def test_closed_it_fails_what_is_under_way_and_begins_nothing() -> None:
    found = two_level_sums(2, 2)
    work = begin(found[0], torch.ones(8), "chunk")
    found[0].close()
    found[0].close()
    with pytest.raises(SchedulerClosed, match="chunk"):
        work.wait()
    with pytest.raises(SchedulerClosed, match="next"):
        begin(found[0], torch.ones(8), "next")
    close_all(found)


def test_a_sum_that_does_not_end_is_waited_for_as_long_as_the_limit() -> None:
    with pytest.raises(SchedulerTimeout):
        PendingSum(0.001).wait()


def test_a_sum_that_has_ended_raises_its_error_each_time() -> None:
    under = PendingSum(LIMIT_S)
    under.ended(TransportError("broken"))
    for _ in range(2):
        with pytest.raises(TransportError, match="broken"):
            under.wait()
    over = PendingSum(LIMIT_S)
    over.ended(None)
    over.wait()
