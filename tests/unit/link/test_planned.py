"""The order that all ranks replay: what each measures, and what is planned of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytesched.course import LED_ROUNDS
from bytesched.errors import InvalidTransition
from bytesched.link.cluster import Cluster
from bytesched.link.control import Control, Weather
from bytesched.link.fabric import Fabric
from bytesched.link.planned import Measured, planned_order
from bytesched.link.work import Bundle, Job, Work
from bytesched.policy import named_policy
from bytesched.task import CommTask

PRIORITY = named_policy("priority")


def tasks_of(*sizes_bytes: int) -> list[CommTask]:
    """The most urgent one first."""
    tasks = []
    for index, nbytes in enumerate(sizes_bytes):
        task = CommTask(f"t{index}", start_at=0, stop_at=nbytes, priority=index)
        task.index = index
        tasks.append(task)
    return tasks


def numbers(bytes_per_s: int, *ready_s: float) -> list[int]:
    return [*([bytes_per_s] * LED_ROUNDS), *(round(1e9 * at_s) for at_s in ready_s)]


@pytest.mark.parametrize(
    ("bytes_per_s", "order"),
    [
        # Task 3 is across before anything else is ready; so is task 2 before task 0.
        (1000, [3, 2, 1, 0]),
        # While task 3 is on the link, all become ready.
        (100, [3, 0, 1, 2]),
        # When it is across, tasks 2 and 1 are.
        (200, [3, 1, 2, 0]),
    ],
)
def test_the_most_urgent_of_what_is_ready_when_the_link_is_free(
    bytes_per_s: int, order: list[int]
) -> None:
    tasks = tasks_of(100, 100, 100, 400)
    plan = planned_order(tasks, numbers(bytes_per_s, 3.5, 1.9, 1, 0), PRIORITY, credit_bytes=1)
    assert plan == order
    assert {task.state.value for task in tasks} == {"waiting"}


def test_credit_lets_more_go_before_the_urgent() -> None:
    ready = numbers(100, 3, 2, 1, 0)
    tasks = tasks_of(100, 100, 100, 400)
    assert planned_order(tasks, ready, PRIORITY, credit_bytes=500) == [3, 2, 0, 1]


@given(st.data())
def test_a_plan_is_a_whole_order(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 10**9), min_size=1, max_size=12))
    ready = data.draw(st.lists(st.floats(0, 9), min_size=len(sizes), max_size=len(sizes)))
    rate = data.draw(st.integers(1, 10**11))
    plan = planned_order(tasks_of(*sizes), numbers(rate, *ready), PRIORITY, credit_bytes=10**6)
    assert sorted(plan) == list(range(len(sizes)))


def test_a_rank_measures_rates_and_medians() -> None:
    measured = Measured()
    for late_ns, busy_ns in ((0, 10**9), (7, 2 * 10**9), (9, 0), (2, 10**8), (1, 10**9)):
        with pytest.raises(InvalidTransition, match=f"{LED_ROUNDS} rounds make a median"):
            measured.numbers()
        measured.round_ends([1000 + late_ns, 1000], nbytes=100, busy_ns=busy_ns)
    assert measured.numbers() == [100, 50, 100 * 10**9, 1000, 100, 2, 0]
    measured.round_ends([8, 4], nbytes=100, busy_ns=10**9)
    assert measured.numbers()[LED_ROUNDS - 1 :] == [100, 4, 0]


def test_a_plan_is_that_of_the_slowest_rank() -> None:
    """Rank 0 has every layer when it first may choose; the other one is ten times as slow.

    Led, all wait for the front layer while the middle one could go.
    """
    work = Work(
        name="three",
        forward_s=(0.1, 0.1, 0.1),
        backward_s=(1.0, 1.0, 1.0),
        jobs=tuple(Job(500, layer, layer) for layer in range(3)),
        bundles=tuple(Bundle((layer,), 0.0) for layer in range(3)),
        bundle_of=(0, 1, 2),
        led=True,
        credit_bytes=1,
    )
    fabric = Fabric(ranks=2, bytes_per_s=100.0, latency_s=0.0)
    leading = Control(fanout=1, send_s=0.0, latency_s=0.0)
    weather = Weather((1.0, 10.0))

    def last_s(control: Control) -> float:
        cluster = Cluster(work, fabric, control)
        ends = [cluster.iterate(weather).ended_s for _ in range(9)]
        return ends[-1] - ends[-2]

    assert last_s(replace(leading, replay=True)) == pytest.approx(38.0)
    assert last_s(leading) == pytest.approx(42.0)
