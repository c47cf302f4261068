"""What is remembered of a tuning, by whom it is found, and what cannot harm it."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paths import SUPPORT
from tuning_files import DONE, FINGERPRINT, RUNNING, TUNED, UNTUNED

from bytesched.tuning.file import TuningFile
from bytesched.tuning.memory import Memory


@pytest.fixture
def memory(tmp_path: Path) -> Memory:
    return Memory(folder=tmp_path)


def test_it_is_found_again(memory: Memory, tmp_path: Path) -> None:
    path = memory.save(DONE)
    assert path is not None
    assert path.parent == tmp_path
    found = Memory(folder=tmp_path).find(FINGERPRINT)
    assert found is not None
    assert found.setting == TUNED
    assert found.trials[0] == DONE.trials[0]
    assert found.saved_at
    assert found.gain_pct == pytest.approx(100 * 40 / 440)
    assert math.isnan(replace(DONE, untuned_ms=0.0).gain_pct)


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"bytes_per_s": 1.6e8, "overhead_s": 3e-4}, True),
        # Compared by what a step takes: see Drift.
        ({"bytes_per_s": 2.7e9}, True),
        ({"overhead_s": 2e-2}, True),
        ({"signature": "other"}, False),
        ({"framework": "torch 2.14.0"}, False),
        ({"version": "9.9"}, False),
        ({"ranks_per_host": (4,)}, False),
        ({"device": "NVIDIA H200"}, False),
        ({"backend": "nccl"}, False),
    ],
)
def test_what_is_the_same_case(memory: Memory, change: dict[str, object], same: bool) -> None:
    memory.save(DONE)
    found = memory.find(replace(FINGERPRINT, **change))  # type: ignore[arg-type]
    assert (found is not None) == same


def test_one_file_per_case(memory: Memory, tmp_path: Path) -> None:
    memory.save(DONE)
    again = replace(DONE, fingerprint=replace(FINGERPRINT, bytes_per_s=1.3e8), setting=UNTUNED)
    memory.save(again)
    memory.save(replace(DONE, fingerprint=replace(FINGERPRINT, signature="other")))
    assert len(list(tmp_path.glob("*.json"))) == 2
    found = memory.find(FINGERPRINT)
    assert found is not None
    assert found.setting == UNTUNED


def test_of_several_links_the_like_one_is_found_or_the_nearest(memory: Memory) -> None:
    for rate in (3e6, 2.7e7):
        memory.save(replace(DONE, fingerprint=replace(FINGERPRINT, bytes_per_s=rate)))
    for rate, nearest in ((3.5e6, 3e6), (6e6, 3e6), (1.6e7, 2.7e7), (2.7e7, 2.7e7), (1e9, 2.7e7)):
        found = memory.find(replace(FINGERPRINT, bytes_per_s=rate))
        assert found is not None
        assert found.fingerprint.bytes_per_s == nearest


def test_one_that_runs_is_kept_but_not_used(memory: Memory) -> None:
    memory.save(RUNNING)
    assert [tuning.state for _, tuning in memory.entries()] == ["running"]
    assert memory.find(FINGERPRINT) is None
    memory.save(DONE)
    memory.save(RUNNING)
    assert [tuning.state for _, tuning in memory.entries()] == ["done"]


def test_one_that_runs_replaces_nothing_that_was_found(tmp_path: Path) -> None:
    """Of another case neither, where there is one file for all."""
    memory = Memory(tmp_path / "mine.json")
    memory.save(DONE)
    other = replace(FINGERPRINT, signature="other")
    memory.save(replace(RUNNING, fingerprint=other))
    assert memory.find(FINGERPRINT) is not None
    memory.save(replace(DONE, fingerprint=other))
    assert memory.find(other) is not None


def test_many_files_are_read_once(
    memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks wait while rank 0 saves a trial."""
    for number in range(9):
        fingerprint = replace(FINGERPRINT, signature=f"model {number}")
        Memory(folder=tmp_path).save(replace(DONE, fingerprint=fingerprint))
    read, found = TuningFile.read, []

    def counted(path: Path) -> TuningFile:
        found.append(path)
        return read(path)

    monkeypatch.setattr(TuningFile, "read", counted)
    for _ in range(20):
        memory.save(RUNNING)
    assert len(found) < 9 + 2 * 20


@pytest.mark.parametrize(
    ("content", "said"),
    [
        *((content, "no valid JSON") for content in ("", "{", "\x00\x01", "[" * 100_000)),
        *((content, "not the memory") for content in ("[]", "null", '{"format": "another"}')),
        ("\ud800", "can't decode"),
        (None, "not a regular file"),
    ],
)
def test_a_foreign_file_is_named_and_left_alone(
    content: str | None, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A pipe is not waited for."""
    path = tmp_path / "mine.json"
    if content is None:
        os.mkfifo(path)
    else:
        path.write_bytes(content.encode("utf-8", "surrogatepass"))
    memory = Memory(path)
    assert memory.find(FINGERPRINT) is None
    assert memory.save(DONE) is None
    if content is not None:
        assert path.read_bytes() == content.encode("utf-8", "surrogatepass")
    for what in ("is ignored", "is left alone"):
        assert any(
            line.startswith(f"tuning: {path} {what}: ") and said in line for line in caplog.messages
        )


def test_a_damaged_file_of_the_cache_is_replaced(
    memory: Memory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = memory.save(DONE)
    assert path is not None
    path.write_text(path.read_text()[:200])
    assert Memory(folder=tmp_path).find(FINGERPRINT) is None
    assert str(path) in caplog.text
    assert memory.save(DONE) == path
    found = memory.find(FINGERPRINT)
    assert found is not None


@given(st.data())
def test_a_file_with_any_wrong_field_is_no_tuning(data: st.DataObject) -> None:
    content = DONE.to_json()
    owner = data.draw(st.sampled_from([content, content["fingerprint"], content["setting"]]))
    name = data.draw(st.sampled_from(sorted(set(owner) - {"step_ms", "untuned_ms", "off_ms"})))
    owner[name] = data.draw(st.sampled_from([None, -1, "x" * 9, [], {}, [None], 1.5e400]))
    try:
        TuningFile.of(json.loads(json.dumps(content)))
    except ValueError:
        return
    taken = isinstance(owner[name], str) or (name, owner[name]) == ("trials", [])
    assert taken, f"{name} = {owner[name]!r} was taken"


def test_what_cannot_be_written_is_no_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    for memory in (Memory(folder=blocked / "below"), Memory(blocked / "below" / "x.json")):
        assert memory.find(FINGERPRINT) is None
        assert memory.save(DONE) is None
    assert caplog.text.count("cannot be written") == 2


def test_the_same_complaint_is_made_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "x.json").write_text("{")
    memory = Memory(folder=tmp_path)
    for _ in range(3):
        memory.find(FINGERPRINT)
    assert len(caplog.records) == 1
    assert caplog.records[0].levelno == logging.WARNING


_WRITER = """
import sys
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tuning_files import DONE
from bytesched.tuning.memory import Memory
memory = Memory(folder=Path(sys.argv[2]))
print("ready", flush=True)
while True:
    assert memory.save(replace(DONE, steps=int(sys.argv[3])))
"""


def _writer(folder: Path, number: int) -> subprocess.Popen[str]:
    writer = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(SUPPORT), str(folder), str(number)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "ready\n"
    return writer


@pytest.mark.procs
def test_concurrent_jobs_and_kills_leave_a_whole_file(memory: Memory, tmp_path: Path) -> None:
    path = memory.save(DONE)
    assert path is not None
    seen = set()
    for round_number in range(4):
        writers = [_writer(tmp_path, 2 * round_number + number) for number in (1, 2)]
        try:
            for _ in range(200):
                seen.add(TuningFile.read(path).steps)
        finally:
            for writer in writers:
                os.kill(writer.pid, signal.SIGKILL)
                writer.wait(30)
                assert writer.stdout is not None
                writer.stdout.close()
        TuningFile.read(path)
    assert len(seen) > 1
    assert memory.save(DONE) == path, "the lock of a killed job is still held"
    assert [other.name for other in tmp_path.glob("*.json")] == [path.name]


def test_the_line_to_paste() -> None:
    assert DONE.paste() == "BYTESCHED_PARTITION_BYTES=1048576 BYTESCHED_CREDIT_BYTES=3145728"
    off = replace(DONE, setting=replace(TUNED, enabled=False))
    assert off.paste() == "BYTESCHED_ENABLED=0"
    other = replace(DONE, setting=replace(TUNED, policy="fifo"))
    assert other.paste().endswith("BYTESCHED_POLICY=fifo")
    assert RUNNING.paste() == ""
