"""CommTask: its table of states, merging and partitioning."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytesched.errors import InvalidTransition
from bytesched.task import CommTask, TaskEvent, TaskState


def task_in(state: TaskState) -> CommTask:
    """A task that got to `state` by legal events."""
    task = CommTask("gradient", start_at=0, stop_at=8)
    route = {
        TaskState.WAITING: (),
        TaskState.READY: (task.notify_ready,),
        TaskState.SENDING: (task.notify_ready, task.start),
        TaskState.DONE: (task.notify_ready, task.start, task.notify_finish),
        TaskState.FAILED: (task.fail,),
    }
    for event in route[state]:
        event()
    assert task.state is state
    return task


def neighbours(sizes: list[int], *, start_at: int = 0, itemsize: int = 1) -> list[CommTask]:
    """Tasks of these sizes in elements, one after the other in a buffer; first is most urgent."""
    ends = list(itertools.accumulate(sizes, initial=start_at))
    return [
        CommTask(f"p{index}", start_at=start, stop_at=stop, itemsize=itemsize, priority=index)
        for index, (start, stop) in enumerate(itertools.pairwise(ends))
    ]


#: The life of a task, written down a second time, so that a change of the table is on purpose.
LEGAL = {
    ("waiting", "notify_ready"): "ready",
    ("ready", "start"): "sending",
    ("sending", "notify_finish"): "done",
    ("done", "rearm"): "waiting",
    ("waiting", "fail"): "failed",
    ("ready", "fail"): "failed",
    ("sending", "fail"): "failed",
}


@pytest.mark.parametrize("event", TaskEvent, ids=lambda event: event.value)
@pytest.mark.parametrize("state", TaskState, ids=lambda state: state.value)
def test_every_pair_is_in_the_table_or_refused(state: TaskState, event: TaskEvent) -> None:
    task = task_in(state)
    method = getattr(task, event.value)
    if (state.value, event.value) in LEGAL:
        method()
        assert task.state.value == LEGAL[state.value, event.value]
    else:
        with pytest.raises(InvalidTransition, match=r"gradient"):
            method()
        assert task.state is state


def test_the_table_leads_through_an_iteration_and_back() -> None:
    task = task_in(TaskState.DONE)
    task.rearm()
    assert task.state is TaskState.WAITING
    assert task.notify_ready(), "a re-armed task waits for its source again"


def test_a_task_is_ready_with_its_last_source() -> None:
    task = CommTask.merge(neighbours([3, 4, 5]))
    assert [task.notify_ready() for _ in range(3)] == [False, False, True]
    assert task.state is TaskState.READY
    with pytest.raises(InvalidTransition):
        task.notify_ready()
    task.start()
    task.notify_finish()
    task.rearm()
    assert [task.notify_ready() for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize(
    ("start_at", "stop_at", "itemsize"), [(4, 4, 1), (5, 4, 1), (-1, 4, 1), (0, 4, 0)]
)
def test_an_empty_or_negative_range_is_refused(start_at: int, stop_at: int, itemsize: int) -> None:
    with pytest.raises(ValueError, match="range"):
        CommTask("none", start_at=start_at, stop_at=stop_at, itemsize=itemsize)


def test_merge_covers_its_tasks_and_takes_the_most_urgent_priority() -> None:
    tasks = neighbours([3, 4, 5], start_at=7, itemsize=4)
    tasks[0].priority, tasks[2].priority = 2, 0
    merged = CommTask.merge(tasks)
    assert (merged.start_at, merged.stop_at, merged.nbytes) == (7, 19, 48)
    assert merged.priority == 0
    assert merged.members == tuple(tasks)


def test_merge_of_one_is_that_one() -> None:
    (task,) = neighbours([3])
    assert CommTask.merge([task]) is task


def test_merge_of_merges_has_all_members() -> None:
    tasks = neighbours([1, 2, 3, 4])
    merged = CommTask.merge([CommTask.merge(tasks[:2]), CommTask.merge(tasks[2:])])
    assert merged.members == tuple(tasks)
    assert merged.missing == 4


def test_merge_refuses_what_does_not_touch() -> None:
    first, second, third = neighbours([3, 4, 5])
    for wrong in ([first, third], [second, first]):
        with pytest.raises(ValueError, match="not neighbours"):
            CommTask.merge(wrong)
    halves = CommTask("halves", start_at=3, stop_at=9, itemsize=2)
    with pytest.raises(ValueError, match="not neighbours"):
        CommTask.merge([first, halves])
    with pytest.raises(ValueError, match="nothing"):
        CommTask.merge([])


buffers = st.builds(
    neighbours,
    st.lists(st.integers(1, 200), min_size=1, max_size=12),
    start_at=st.integers(0, 50),
    itemsize=st.sampled_from([1, 2, 4, 8]),
).map(CommTask.merge)


@settings(max_examples=150)
@given(buffers, st.integers(1, 1000))
def test_parts_cover_the_task_exactly(task: CommTask, size: int) -> None:
    parts = task.partition(size)
    assert parts[0].start_at == task.start_at
    assert parts[-1].stop_at == task.stop_at
    for left, right in itertools.pairwise(parts):
        assert left.stop_at == right.start_at
    assert sum(part.nbytes for part in parts) == task.nbytes
    assert {part.itemsize for part in parts} == {task.itemsize}


@settings(max_examples=150)
@given(buffers, st.integers(1, 1000))
def test_a_part_waits_for_every_source_that_it_overlaps_and_no_other(
    task: CommTask, size: int
) -> None:
    for part in task.partition(size):
        overlapping = tuple(
            source
            for source in task.members
            if max(source.start_at, part.start_at) < min(source.stop_at, part.stop_at)
        )
        assert overlapping
        assert part.members == overlapping
        assert part.missing == len(overlapping)
        assert part.priority == min(source.priority for source in overlapping)


@settings(max_examples=150)
@given(buffers, st.integers(1, 1000))
def test_no_part_is_much_larger_or_smaller_than_asked(task: CommTask, size: int) -> None:
    step = max(1, size // task.itemsize)
    parts = task.partition(size)
    for part in parts:
        elements = part.stop_at - part.start_at
        assert elements < 2 * step or elements == 1
        assert elements >= step / 2 or parts == (task,)


@settings(max_examples=50)
@given(buffers)
def test_any_element_can_be_cut(task: CommTask) -> None:
    parts = task.partition(1)
    assert [part.start_at for part in parts] == list(range(task.start_at, task.stop_at))


@given(st.integers(1, 10_000))
def test_a_lone_task_below_one_and_a_half_parts_stays_whole(nbytes: int) -> None:
    task = CommTask("p", start_at=0, stop_at=nbytes)
    parts = task.partition(1000)
    assert (parts == (task,)) == (nbytes < 1500)


def test_a_cut_moves_to_the_end_of_a_source_nearby() -> None:
    parts = CommTask.merge(neighbours([90, 300, 60, 30])).partition(100)
    assert [(part.start_at, part.stop_at) for part in parts] == [
        (0, 90),
        (90, 190),
        (190, 290),
        (290, 390),
        (390, 480),
    ]


def test_a_cut_takes_the_end_of_a_source_that_is_nearest() -> None:
    parts = CommTask.merge(neighbours([10] * 60)).partition(100)
    assert [part.nbytes for part in parts] == [100] * 6
    parts = CommTask.merge(neighbours([80, 15, 120])).partition(100)
    assert [part.nbytes for part in parts] == [95, 120]
    parts = CommTask.merge(neighbours([80, 45, 100])).partition(100)
    assert [part.nbytes for part in parts] == [80, 145]


def test_parts_are_named_after_where_they_begin() -> None:
    parts = CommTask.merge(neighbours([100, 230])).partition(100)
    assert [part.name for part in parts] == ["p0", "p1", "p1[100:]"]


def test_a_merge_whole_or_cut_is_ready_after_the_same_sources() -> None:
    merged = CommTask.merge(neighbours([40, 40, 200]))
    parts = merged.partition(100)
    ready = {
        source.name: [part.name for part in parts if source in part.members and part.notify_ready()]
        for source in merged.members
    }
    assert sorted(itertools.chain(*ready.values())) == sorted(part.name for part in parts)
    assert ready["p0"] == []


@pytest.mark.parametrize("state", [TaskState.READY, TaskState.SENDING, TaskState.DONE])
def test_only_a_waiting_task_is_cut(state: TaskState) -> None:
    with pytest.raises(InvalidTransition, match="partition"):
        task_in(state).partition(2)


def test_a_task_that_heard_of_a_source_is_not_cut() -> None:
    task = CommTask.merge(neighbours([50, 50]))
    task.notify_ready()
    with pytest.raises(InvalidTransition, match="partition"):
        task.partition(10)


def test_parts_are_neither_cut_nor_merged_again() -> None:
    parts = CommTask("p", start_at=0, stop_at=100).partition(40)
    with pytest.raises(InvalidTransition, match="partition"):
        parts[0].partition(10)
    with pytest.raises(ValueError, match="part"):
        CommTask.merge(parts)


def test_a_task_is_cut_once() -> None:
    task = CommTask("p", start_at=0, stop_at=100)
    task.partition(10)
    with pytest.raises(InvalidTransition, match="partition"):
        task.partition(20)
    with pytest.raises(ValueError, match="at least 1 byte"):
        CommTask("p", start_at=0, stop_at=100).partition(0)
