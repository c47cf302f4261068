"""CommTask: its table of states, and how it is cut."""

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


def test_a_task_is_ready_with_its_last_source() -> None:
    task = CommTask("pull", start_at=0, stop_at=8, sources=3)
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


@st.composite
def buffers(draw: st.DrawFn) -> CommTask:
    """Any range of any buffer."""
    start_at = draw(st.integers(0, 50))
    stop_at = start_at + draw(st.integers(1, 2000))
    itemsize = draw(st.sampled_from([1, 2, 4, 8]))
    return CommTask("p", start_at=start_at, stop_at=stop_at, itemsize=itemsize, priority=3)


@settings(max_examples=200)
@given(buffers(), st.integers(1, 1000))
def test_parts_cover_the_task_exactly_and_are_about_as_large_as_asked(
    task: CommTask, size: int
) -> None:
    parts = task.partition(size)
    assert parts[0].start_at == task.start_at
    assert parts[-1].stop_at == task.stop_at
    for left, right in itertools.pairwise(parts):
        assert left.stop_at == right.start_at
    assert sum(part.nbytes for part in parts) == task.nbytes
    assert {(part.itemsize, part.priority) for part in parts} == {(task.itemsize, 3)}
    step = max(1, size // task.itemsize)
    for part in parts:
        elements = part.stop_at - part.start_at
        assert elements < 2 * step or elements == 1
        assert elements >= step / 2 or parts == (task,)


@given(st.integers(1, 10_000))
def test_a_lone_task_below_one_and_a_half_parts_stays_whole(nbytes: int) -> None:
    task = CommTask("p", start_at=0, stop_at=nbytes)
    parts = task.partition(1000)
    assert (parts == (task,)) == (nbytes < 1500)


def test_parts_are_named_after_where_they_begin() -> None:
    parts = CommTask("p", start_at=40, stop_at=270).partition(100)
    assert [(part.name, part.start_at) for part in parts] == [("p", 40), ("p[100:]", 140)]


def test_a_part_has_a_size() -> None:
    with pytest.raises(ValueError, match="at least 1 byte"):
        CommTask("p", start_at=0, stop_at=100).partition(0)
