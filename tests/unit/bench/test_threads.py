"""What threads use, as the bench counts and prints it."""

from __future__ import annotations

import threading
import time

import pytest

from bytesched.bench.table import thread_table
from bytesched.plugins.bench.threads import Usage, usage, used

NAME = "a busy thread"


def test_a_thread_is_known_by_its_name_with_what_it_used() -> None:
    before = usage()
    if not before:
        pytest.skip("there is no /proc here")
    worked, may_end = threading.Event(), threading.Event()

    def work() -> None:
        began_ns = time.thread_time_ns()
        while time.thread_time_ns() - began_ns < 50_000_000:
            pass
        worked.set()
        may_end.wait(10.0)

    thread = threading.Thread(target=work, name=NAME)
    thread.start()
    assert worked.wait(30.0)
    spent = used(before, usage(), iterations=10)
    may_end.set()
    thread.join(10.0)
    assert spent[NAME]["cpu_ms"] >= 4.9
    assert NAME not in before


def test_a_thread_that_has_ended_counts_no_less_than_nothing() -> None:
    before = {"one": Usage(5, 5, 5)}
    assert used(before, {"one": Usage(3, 3, 3)}, 1)["one"] == {
        "cpu_ms": 0.0,
        "waits": 0.0,
        "preempted": 0.0,
    }


def test_the_table_has_a_column_for_each_system() -> None:
    def turn(cpu_ms: float) -> dict[str, object]:
        idle = {"cpu_ms": 0.01, "waits": 1.0, "preempted": 0.0}
        return {"threads": {"main": {"cpu_ms": cpu_ms, "waits": 7.0}, "idle": idle}}

    systems = {
        "ddp": {"rounds": [turn(10.0), turn(30.0), turn(11.0)]},
        "bytesched": {"rounds": [turn(20.0)]},
        "horovod": {"rounds": [{}]},
    }
    lines = thread_table({"systems": systems}).splitlines()
    assert lines[0].split() == ["thread", "ddp", "bytesched", "horovod"]
    assert lines[1].split() == ["main", "11.0", "(7)", "20.0", "(7)", "-"]
    assert not any("idle" in line for line in lines)
    assert thread_table({"systems": {"horovod": {"rounds": [{}]}}}) == ""
