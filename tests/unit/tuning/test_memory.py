"""What is remembered of a tuning, by whom it is found, and what cannot harm it."""

from __future__ import annotations

import json
import logging
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tuning_files import DONE, FINGERPRINT, TUNED, UNTUNED

from bytesched.tunable import Setting
from bytesched.tuning.controller import Adopted
from bytesched.tuning.file import TuningFile
from bytesched.tuning.memory import Logbook, Memory


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


@pytest.mark.parametrize(
    ("content", "said"),
    [
        *((content, "no valid JSON") for content in ("", "{", "\x00\x01", "[" * 100_000)),
        *((content, "not the memory") for content in ("[]", "null", '{"format": "another"}')),
        (json.dumps(DONE.to_json() | {"setting": None}), "came to no end"),
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
    memory = Memory(folder=tmp_path)
    memory.path_of(FINGERPRINT).write_text("{")
    for _ in range(3):
        memory.find(FINGERPRINT)
    assert len(caplog.records) == 1
    assert caplog.records[0].levelno == logging.WARNING


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        (TUNED, "BYTESCHED_PARTITION_BYTES=1048576 BYTESCHED_CREDIT_BYTES=3145728"),
        (replace(TUNED, enabled=False), "BYTESCHED_ENABLED=0"),
    ],
)
def test_the_line_to_paste(
    setting: Setting, line: str, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "bytesched")
    adopted = Adopted(setting, {UNTUNED: 0.44, setting: 0.4}, 120)
    Logbook(memory, FINGERPRINT, UNTUNED).note(adopted, more_trials=0)
    assert caplog.messages[-1] == f"tuning: to fix it: {line}"
