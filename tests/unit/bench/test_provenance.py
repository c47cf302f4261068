"""Where a result comes from, what it was measured with, and how that is measured again."""

from __future__ import annotations

import datetime
import os
import subprocess
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from bytesched.bench import provenance as origin
from bytesched.bench.compare import same_again
from bytesched.bench.provenance import difference, setting
from bytesched.bench.specification import bench_parser, specification
from bytesched.environment import RankView

ALONE = RankView("none", 0, -1, 1)


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=x", "-c", "user.email=x@x"]
    done = subprocess.run(
        ["git", "-C", folder, *who, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "bytesched").mkdir()
    (tmp_path / "bytesched" / "core.py").write_text("1\n")
    (tmp_path / "notes.md").write_text("1\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def test_a_checkout_has_a_commit_and_is_dirty_by_its_sources_alone(checkout: Path) -> None:
    assert origin.source(checkout)["commit"] == git(checkout, "rev-parse", "HEAD")
    # What is measured is written beside the sources, and does not change them.
    (checkout / "notes.md").write_text("2\n")
    (checkout / "result.json").write_text("{}\n")
    assert origin.source(checkout)["dirty"] is False
    (checkout / "bytesched" / "core.py").write_text("2\n")
    assert origin.source(checkout)["dirty"] is True


def test_a_package_within_another_repository_has_no_commit(checkout: Path, tmp_path: Path) -> None:
    inside = checkout / "site-packages"
    inside.mkdir()
    assert origin.source(inside)["commit"] == ""
    assert origin.source(tmp_path / "nowhere")["commit"] == ""


def test_it_says_when_with_what_and_where(monkeypatch: pytest.MonkeyPatch) -> None:
    found = origin.provenance("bytesched bench --clip 1")
    assert found["command"] == "bytesched bench --clip 1"
    when = datetime.datetime.fromisoformat(found["date"])
    assert when.utcoffset() == datetime.timedelta(0)
    machine = found["machine"]
    assert machine["cores"] == len(os.sched_getaffinity(0))
    assert machine["kernel"] == os.uname().release
    assert machine["memory_bytes"] > 1 << 20
    assert machine["cpu"]
    monkeypatch.setattr(os, "sched_getscheduler", lambda _: os.SCHED_RR)
    monkeypatch.setattr(os, "sched_getparam", lambda _: os.sched_param(5))
    assert origin.priority() == "rr 5"


def setting_of(command: str) -> dict[str, Any]:
    options: Namespace = bench_parser().parse_args(command.split())
    return setting(specification(options, ALONE), ALONE)


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ("--lab 4", "ranks was 2 and is 4 now"),
        ("--rate 2gbit", "rate was 1gbit and is 2gbit now"),
        ("--ranks-per-host 2", "ranks was 2 and is 4 now"),
        ("--clip 1", "clip was 0.0 and is 1.0 now"),
        ("--comm-ratio 1", "comm_ratio was not set and is 1.0 now"),
        ("--emulate vgg", "emulate was gpt and is vgg now"),
    ],
)
def test_settings_that_differ_are_named(more: str, name: str) -> None:
    command = "--lab 2 --emulate gpt --systems ddp"
    assert difference(setting_of(command), setting_of(f"{command} {more}")).startswith(name)


def test_numbers_of_iterations_and_systems_are_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    before = setting_of("--emulate gpt --systems ddp")
    more = "--rounds 9 --iterations 3 --warmup 2 --sweep-iterations 1"
    now = setting_of(f"--emulate gpt --systems ddp,bytesched {more}")
    assert difference(before, now) == ""
    monkeypatch.setattr(origin, "priority", lambda: "rr 5")
    there = setting_of("--emulate gpt --systems ddp")
    assert difference(before, there) == "priority was not set and is rr 5 now"


def test_the_same_again_leaves_out_what_was_written() -> None:
    recorded = (
        "chrt -r 5 bytesched bench --lab 2 --json old.json --emulate gpt --png=a.png --clip 1 "
        "--compare a.json b.json --systems ddp,bytesched:shard=true"
    )
    kept = "--lab 2 --emulate gpt --clip 1 --systems ddp,bytesched:shard=true --json new.json"
    assert same_again(recorded, ["--json", "new.json"]) == kept.split()
    assert same_again("", ["--lab", "2"]) == ["--lab", "2"]


def test_the_same_again_records_nothing_and_so_takes_one_batch() -> None:
    """The one that systems had: of several batches, the largest."""
    for before, kept in (("--batch 4,16,8", "--batch 16"), ("--batch=4,16", "--batch 16")):
        recorded = f"bytesched bench --model vgg {before} --record vgg.json --rounds 1"
        assert same_again(recorded, []) == f"--model vgg {kept} --rounds 1".split()
