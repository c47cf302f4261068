"""The timeline: what it writes, what survives a kill, and what `bytesched report` makes of it."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bytesched.errors import ConfigError
from bytesched.trace.reading import ANCHOR, load_events, merge_traces, read_traces
from bytesched.trace.timeline import Timeline

MS = 1_000_000


@pytest.fixture
def timeline(tmp_path: Path) -> Timeline:
    return Timeline(tmp_path)


def events_of(timeline: Timeline) -> list[dict[str, Any]]:
    events = json.loads(timeline.path.read_text())
    assert isinstance(events, list)
    return events


def closed(timeline: Timeline) -> list[dict[str, Any]]:
    """Its events, when it is closed."""
    timeline.close()
    return events_of(timeline)


def slices(events: list[dict[str, Any]], track: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X" and event["cat"] == track]


def record_iteration(timeline: Timeline, step: int, start_ns: int, *, crossing: bool) -> None:
    """Forward 0-10 ms, backward 10-30, sends up to 50, step back at 50; or at 30, crossing."""
    timeline.on_span("forward", "forward", start_ns, start_ns + 10 * MS)
    timeline.on_span("backward", "backward", start_ns + 10 * MS, start_ns + 30 * MS)
    for chunk in (1, 0):
        ready_ns = start_ns + (20 if chunk else 30) * MS
        timeline.on_span("queue", f"layer{chunk}", ready_ns, ready_ns + MS, {"chunk": chunk})
        args = {"chunk": chunk, "bytes": 1000}
        timeline.on_span("send", f"layer{chunk}", ready_ns + MS, ready_ns + 20 * MS, args)
    timeline.on_step(step, start_ns + (30 if crossing else 50) * MS)


def test_file_is_whole_json_after_every_step_and_after_close(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path, rank=3)
    assert timeline.path == tmp_path / "rank3.trace.json"
    start_ns = time.perf_counter_ns()
    for step in range(30):
        record_iteration(timeline, step, start_ns + step * 50 * MS, crossing=False)
        assert len(slices(events_of(timeline), "send")) == 2 * (step + 1)
    timeline.close()
    assert len(slices(closed(timeline), "send")) == 60
    assert timeline.path.read_bytes().endswith(b"}\n]\n")
    assert [path.name for path in tmp_path.iterdir()] == ["rank3.trace.json"]


def test_process_and_threads_are_named_and_sorted_and_no_other_ranks(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path, rank=2)
    record_iteration(timeline, 0, time.perf_counter_ns(), crossing=False)
    events = closed(timeline)
    other_timeline = Timeline(tmp_path, rank=1)
    record_iteration(other_timeline, 0, time.perf_counter_ns(), crossing=False)
    other = closed(other_timeline)
    assert not {event["tid"] for event in events} & {event["tid"] for event in other}
    assert {event["pid"] for event in events} == {2}
    metadata = [event for event in events if event["ph"] == "M"]
    facts = {event["name"]: event["args"] for event in metadata}
    assert facts["process_name"] == {"name": "rank 2"}
    assert facts["process_sort_index"] == {"sort_index": 2}
    names = {e["tid"]: e["args"]["name"] for e in metadata if e["name"] == "thread_name"}
    order = {
        e["tid"]: e["args"]["sort_index"] for e in metadata if e["name"] == "thread_sort_index"
    }
    assert sorted(names, key=order.__getitem__) == sorted(names)
    in_order = [names[tid] for tid in sorted(names)]
    assert in_order == ["forward", "backward", "queue", "send", "send 2"]
    assert {event["tid"] for event in slices(events, "send")} <= names.keys()


def test_times_are_exact_to_the_nanosecond(timeline: Timeline) -> None:
    start_ns = time.perf_counter_ns() + 3_600_000_000_001
    timeline.on_span("send", "a", start_ns, start_ns + 1_234_567)
    timeline.close()
    text = timeline.path.read_text()
    assert '"dur":1234.567' in text
    (sent,) = slices(json.loads(text), "send")
    assert 3.6e9 < sent["ts"] < 3.61e9


@pytest.mark.parametrize("seed", range(5))
def test_slices_of_a_thread_are_apart(timeline: Timeline, seed: int) -> None:
    chance = random.Random(seed)
    at_ns = time.perf_counter_ns()
    for step in range(5):
        for chunk in range(40):
            start_ns = at_ns + chance.randrange(60 * MS)
            timeline.on_span("send", f"c{chunk}", start_ns, start_ns + chance.randrange(20 * MS))
        at_ns += 40 * MS  # less than a batch spans: a step may end while chunks are in flight
        timeline.on_step(step, at_ns)
    sent = slices(closed(timeline), "send")
    assert len(sent) == 200
    by_thread: dict[int, list[tuple[int, int]]] = {}
    for event in sent:
        start, end = round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)
        by_thread.setdefault(event["tid"], []).append((start, end))
    assert len(by_thread) > 1
    for spans in by_thread.values():
        assert all(end <= start for (_, end), (start, _) in pairwise(sorted(spans)))


def test_lanes_are_used_again(timeline: Timeline) -> None:
    for round_ in range(50):
        for at_ns in (0, 10, 20):
            timeline.on_span("send", "a", 100 * round_ + at_ns, 100 * round_ + at_ns + 30)
        timeline.on_step(round_, 100 * round_ + 60)
    assert len({event["tid"] for event in slices(closed(timeline), "send")}) == 3


def test_arguments_that_json_does_not_know_are_written_as_text(
    timeline: Timeline, tmp_path: Path
) -> None:
    now_ns = time.perf_counter_ns()
    odd = {"nan": float("nan"), "path": tmp_path, "quote": '"\n\u2028é'}
    timeline.on_span("send", 'a"b\\\né' * 100, now_ns, now_ns + 1, odd)
    timeline.on_span("send", "infinite", now_ns + 1, now_ns + 2, {"inf": float("inf")})
    timeline.on_span("send", "big", now_ns + 2, now_ns + 3, {"text": "x" * 100_000})
    timeline.on_span("send", "backwards", now_ns + 9, now_ns + 5)
    timeline.close()

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    events = json.loads(timeline.path.read_text(), parse_constant=refuse)
    odd_slice, infinite, big, backwards = slices(events, "send")
    assert odd_slice["args"]["nan"] == "nan"
    assert infinite["args"] == {"inf": "inf"}
    assert big["args"] == {"text": "x" * 100_000}
    assert backwards["dur"] > 0


def test_hooks_from_many_threads_lose_nothing(timeline: Timeline) -> None:
    threads, spans = 6, 500
    go = threading.Barrier(threads + 1)

    def record(index: int) -> None:
        go.wait()
        for chunk in range(spans):
            now_ns = time.perf_counter_ns()
            timeline.on_span("queue", f"{index}.{chunk}", now_ns, now_ns + 10)

    workers = [threading.Thread(target=record, args=(index,)) for index in range(threads)]
    for worker in workers:
        worker.start()
    go.wait()
    step = 0
    while any(worker.is_alive() for worker in workers):
        timeline.on_step(step, time.perf_counter_ns())
        step += 1
    events = closed(timeline)
    names = [event["name"] for event in slices(events, "queue") if "." in event["name"]]
    assert len(names) == len(set(names)) == threads * spans


def test_a_hook_makes_few_calls_and_a_step_one_write(
    timeline: Timeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[int] = []
    pwrite = os.pwrite

    def counted(fd: int, data: Any, at: int) -> int:
        writes.append(len(data))
        return pwrite(fd, data, at)

    monkeypatch.setattr(os, "pwrite", counted)
    calls: list[str] = []
    sys.setprofile(lambda frame, event, arg: calls.append(event) if "call" in event else None)
    try:
        timeline.on_span("send", "a", 1, 2, {"chunk": 1})
    finally:
        sys.setprofile(None)
    assert len(calls) <= 5 + 1, "the hook, two len, the record and the append"
    assert not writes
    for chunk in range(300):
        timeline.on_span("send", "a", chunk * 10, chunk * 10 + 5, {"chunk": chunk})
    timeline.on_step(0, 4000)
    assert len(writes) == 1
    timeline.close()


def test_memory_is_bounded_and_the_loss_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bytesched.trace.timeline.MOST_PENDING", 100)
    timeline = Timeline(tmp_path)
    for chunk in range(250):
        timeline.on_span("send", "a", chunk * 10, chunk * 10 + 5)
    assert "100 pending, 150 dropped" in repr(timeline)
    events = closed(timeline)
    assert len(slices(events, "send")) == 100
    assert [e["args"] for e in events if e["name"] == "dropped events"] == [{"count": 150}]


def test_a_full_file_ends_the_trace_and_stays_valid(
    timeline: Timeline, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("bytesched.trace.timeline.MOST_BYTES", 1 << 20)
    for step in range(40):
        for chunk in range(500):
            at_ns = (step * 500 + chunk) * 10
            timeline.on_span("send", "a", at_ns, at_ns + 5)
        timeline.on_step(step, step)
    timeline.close()
    assert timeline.path.stat().st_size <= 1 << 20
    assert len(slices(events_of(timeline), "send")) > 5000
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "is full" in caplog.text


def test_a_disk_that_fails_ends_the_trace_not_the_training(
    timeline: Timeline, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    record_iteration(timeline, 0, time.perf_counter_ns(), crossing=False)

    def fail(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", fail)
    for step in range(1, 4):
        record_iteration(timeline, step, time.perf_counter_ns(), crossing=False)
    timeline.close()
    assert len([r for r in caplog.records if "No space left" in r.message]) == 1
    assert len(slices(events_of(timeline), "send")) == 2


def test_hooks_after_close_do_nothing(timeline: Timeline) -> None:
    record_iteration(timeline, 0, time.perf_counter_ns(), crossing=False)
    timeline.close()
    before = timeline.path.read_bytes()
    record_iteration(timeline, 1, time.perf_counter_ns(), crossing=False)
    timeline.close()
    assert timeline.path.read_bytes() == before


def test_a_forked_child_does_not_write(timeline: Timeline) -> None:
    record_iteration(timeline, 0, time.perf_counter_ns(), crossing=False)
    before = timeline.path.read_bytes()
    child = os.fork()
    if child == 0:
        timeline.on_span("send", "of the child", 1, 2)
        timeline.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert timeline.path.read_bytes() == before
    timeline.close()


def test_a_folder_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write .*file/inside/rank0\.trace\.json"):
        Timeline(tmp_path / "file" / "inside")
    with pytest.raises(ConfigError, match="cannot write"):
        Timeline("/proc/bytesched")


def test_a_read_only_folder_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root may write everywhere
    try:
        with pytest.raises(ConfigError, match="Permission denied"):
            Timeline(tmp_path)
    finally:
        os.seteuid(user)
        tmp_path.chmod(0o700)


def test_a_file_of_another_program_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "rank0.trace.json"
    path.write_text('{"traceEvents": []}')
    with pytest.raises(ConfigError, match=r"rank0\.trace\.json is there and is no trace of"):
        Timeline(tmp_path)
    assert path.read_text() == '{"traceEvents": []}'
    for text in ("", None):
        if text is not None:
            path.write_text(text)
        Timeline(tmp_path).close()
        assert load_events(path)


WRITER = """
import sys, time
from bytesched.trace.timeline import Timeline
timeline = Timeline(sys.argv[1], rank=0)
for step in range(10**9):
    for chunk in range(300):
        now_ns = time.perf_counter_ns()
        timeline.on_span("queue", "layer%d" % chunk, now_ns, now_ns + 500, {"chunk": chunk})
    timeline.on_step(step, time.perf_counter_ns())
    print(step, flush=True)
"""


@pytest.mark.procs
def test_file_can_be_read_after_sigkill_in_the_middle(tmp_path: Path) -> None:
    sizes = []
    for attempt in range(8):
        command = [sys.executable, "-c", WRITER, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            for _ in range(1 + attempt):
                writer.stdout.readline()
            writer.send_signal(signal.SIGKILL)
        events, _ = load_events(tmp_path / "rank0.trace.json")
        assert events[0]["name"] == ANCHOR
        assert sum(event["name"].startswith("step") for event in events) >= 1 + attempt
        sizes.append(len(events))
    assert max(sizes) > 1000


def test_a_write_that_breaks_off_anywhere_leaves_what_can_be_read(timeline: Timeline) -> None:
    wholes = []
    for step in range(2):
        record_iteration(timeline, step, 1, crossing=False)
        wholes.append(timeline.path.read_bytes())
    timeline.close()
    before, whole = wholes
    counts = []
    for end in range(len(before), len(whole)):
        timeline.path.write_bytes(whole[:end])
        counts.append(len(load_events(timeline.path)[0]))
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (len(json.loads(before)), len(json.loads(whole)))


@pytest.fixture
def two_ranks(tmp_path: Path) -> Path:
    """Rank 1's clock is 5 s ahead of rank 0's, which the offset corrects; the same moments."""
    for rank in (0, 1):
        timeline = Timeline(tmp_path, rank=rank, clock_offset_ns=-5_000_000_000 * rank)
        text = timeline.path.read_text()
        anchor = json.loads(text)[0]["args"]["wall_ns"]
        start_ns = time.perf_counter_ns()
        for step in range(4):
            record_iteration(timeline, step, start_ns + step * 60 * MS, crossing=bool(rank))
        timeline.close()
        text = timeline.path.read_text()
        wall_ns = 10**18 + rank * (5_000_000_000 + 20 * MS)
        timeline.path.write_text(text.replace(str(anchor), str(wall_ns)))
    return tmp_path


def test_merge_puts_ranks_on_one_clock(two_ranks: Path, said: Callable[..., str]) -> None:
    output = two_ranks / "all.json"
    assert "2 ranks" in said("report", two_ranks, "-o", output)
    merged = json.loads(output.read_text())["traceEvents"]
    for rank in (0, 1):
        alone, _ = load_events(two_ranks / f"rank{rank}.trace.json")
        shifted = [event for event in merged if event["pid"] == rank]
        assert len(alone) == len(shifted)
        for before, after in zip(alone, shifted, strict=True):
            if "ts" in before:
                assert after["ts"] - before["ts"] == pytest.approx(20_000 * rank, abs=0.01)


def test_merge_names_and_skips_what_is_no_trace(two_ranks: Path, said: Callable[..., str]) -> None:
    cut = two_ranks / "rank1.trace.json"
    text = cut.read_text()
    cut.write_text(text[: len(text) - 150])
    (two_ranks / "rank2.trace.json").write_text("")
    (two_ranks / "rank3.trace.json").write_text('[{"ph":"X","ts":1,"name":"someone else\'s"}]')
    (two_ranks / "rank4.trace.json").write_bytes(b"\xff\xfe\x00")
    (two_ranks / "rank5.trace.json").write_text('{"a": 1}')
    (two_ranks / "rank6.trace.json").write_text((two_ranks / "rank0.trace.json").read_text())
    (two_ranks / "rank7.trace.json").mkdir()
    output = two_ranks / "all.json"
    complaints = said("report", two_ranks, "-o", output)
    assert "rank1.trace.json: cut off" in complaints
    for rank in range(2, 8):
        assert f"rank{rank}.trace.json: left out" in complaints
    merged = json.loads(output.read_text())["traceEvents"]
    assert {event["pid"] for event in merged} == {0, 1}


def test_merge_refuses_when_nothing_is_usable(tmp_path: Path, said: Callable[..., str]) -> None:
    output = tmp_path / "all.json"
    assert merge_traces([]) == ([], [])
    complaints = said("report", tmp_path / "no.json", "-o", output, code=1)
    assert "no.json: left out" in complaints
    assert "nothing to merge" in complaints
    assert "holds no rank*.trace.json" in said("report", tmp_path, "-o", output, code=1)
    assert not output.exists()


def test_merge_refuses_a_merged_trace_and_an_output_that_cannot_be(
    two_ranks: Path, said: Callable[..., str]
) -> None:
    output, nowhere = two_ranks / "all.json", two_ranks / "no" / "all.json"
    said("report", two_ranks, "-o", output)
    assert "already a merged trace" in said("report", output, "-o x.json", code=1)
    assert "no such folder" in said("report", two_ranks, "-o", nowhere, code=2)


def test_merged_order_of_ranks_is_by_number(tmp_path: Path, said: Callable[..., str]) -> None:
    for rank in (10, 9):
        Timeline(tmp_path, rank=rank).close()
    said("report", tmp_path, "-o", tmp_path / "out.json")
    merged = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    assert list(dict.fromkeys(event["pid"] for event in merged)) == [9, 10]


def test_summary_prints_means_and_the_slowest_steps(
    two_ranks: Path, said: Callable[..., str]
) -> None:
    plain, crossing = (read_traces(two_ranks / f"rank{rank}.trace.json")[0] for rank in (0, 1))
    # Sends last from 21 to 50 ms after the start of each iteration of 60 ms.
    for iteration in plain.iterations():
        assert iteration.step_ms == pytest.approx(60)
        assert iteration.link_busy_ms == pytest.approx(29)
        assert iteration.crossed_ms == 0
    for iteration in crossing.iterations():
        assert iteration.crossed_ms == pytest.approx(20)
    merged = two_ranks / "all.json"
    said("report", two_ranks, "-o", merged)
    shown = said("report", merged)
    assert said("report", two_ranks) == shown, "of a folder as of what it is merged to"
    means, slowest = shown.split("\n\n")[:2]
    _, titles, *rows = (line.split() for line in means.splitlines())
    assert titles[:4] == ["rank", "step", "step", "ms"]
    assert [row[:3] for row in rows] == [["0", "3", "steps"], ["1", "3", "steps"]]
    assert [row[3] for row in rows] == ["60.00", "60.00"]
    assert rows[0][-1] == "0.00"
    assert rows[1][-1] == "20.00"
    assert len(slowest.splitlines()) == 2 + 5
    assert len(said("report", merged, "--all").splitlines()) == 2 + 2 * 3


def test_the_slowest_steps_come_first(timeline: Timeline, said: Callable[..., str]) -> None:
    start_ns = time.perf_counter_ns()
    for step, at_ms in enumerate((0, 10, 40, 60)):
        timeline.on_step(step, start_ns + at_ms * MS)
    timeline.close()
    slowest = said("report", timeline.path).split("\n\n")[1].splitlines()
    longest = [line.split()[1:3] for line in slowest[2:]]
    assert longest == [["2", "30.00"], ["3", "20.00"], ["1", "10.00"]]


def test_summary_of_nothing_fails(
    timeline: Timeline, tmp_path: Path, said: Callable[..., str]
) -> None:
    timeline.close()
    assert "no whole iteration" in said("report", timeline.path, code=1)
    (tmp_path / "other.json").write_text("[1, 2]")
    assert "other.json" in said("report", tmp_path / "other.json", code=1)
