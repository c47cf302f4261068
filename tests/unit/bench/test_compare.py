"""Two results: what counts as worse, and what cannot be compared."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bytesched.bench import figures
from bytesched.bench.compare import changes, load_result, report
from bytesched.commands import bench
from bytesched.errors import ConfigError


def system(ms: float, **fields: Any) -> dict[str, Any]:
    return {"rounds": [{"iteration_ms": [ms]}], "losses": "identical", **fields}


def a_result(ours_ms: float = 80.0, slower: float = 1.0, **counts: float) -> dict[str, Any]:
    """DDP and bytesched, whose time is a share of DDP's 100 ms."""
    return {
        "date": "2026-11-24T00:00:00+00:00",
        "commit": "0123456789abcdef",
        "dirty": True,
        "machine": {"cpu": "Some CPU", "cores": 2, "torch": "2.13.0"},
        "setting": {"rate": "1gbit", "clip": 0.0},
        "network": "links of 1 Gbit/s between emulated hosts",
        "systems": {
            "ddp": system(120.0 * slower),
            "ddp-best": system(100.0 * slower),
            "bytesched": system(ours_ms * slower, **({"counts": counts} if counts else {})),
        },
    }


def regressions(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    return [change.figure for change in changes(old, new) if change.is_regression]


@pytest.mark.parametrize(
    ("old", "new", "worse"),
    [
        ({}, {"ours_ms": 83.9}, ""),
        ({}, {"ours_ms": 84.1}, "time, as a multiple of ddp-best's"),
        # A machine that is half as fast in all of it.
        ({}, {"slower": 2.0}, ""),
        ({"calls_per_tensor": 60.0}, {"calls_per_tensor": 69.0}, ""),
        ({"calls_per_tensor": 60.0}, {"calls_per_tensor": 69.1}, "Python calls for each tensor"),
        ({"messages": 20}, {"messages": 21}, ""),
        ({"messages": 20}, {"messages": 22}, "messages of an iteration"),
        ({"messages": 20}, {"messages": 0}, ""),
        ({"messages": 0}, {"messages": 0}, ""),
        ({"messages": 0}, {"messages": 1}, "messages of an iteration"),
        ({"messages": 3}, {"messages": math.nan}, "messages of an iteration"),
        ({"bytes": 1000}, {"bytes": 1010}, ""),
        ({"bytes": 1000}, {"bytes": 1011}, "bytes of an iteration"),
    ],
)
def test_what_may_grow_by_how_much(
    old: dict[str, float], new: dict[str, float], worse: str
) -> None:
    assert regressions(a_result(**old), a_result(**new)) == [worse] * bool(worse)


def test_losses_that_differ_now_are_a_regression() -> None:
    new = a_result()
    new["systems"]["bytesched"]["losses"] = "differ by 1.0e-07"
    [figure] = regressions(a_result(), new)
    assert figure.startswith("losses and weights")
    assert not regressions(new, new)


def test_times_are_compared_beside_the_same_peer() -> None:
    """A peer whose bucket is the best one now is not the one of the old result."""

    def of(new_systems: str) -> tuple[Any, ...]:
        """With these alone in the new result: what is compared, and the times."""
        old, new = a_result(), a_result()
        for result, four_ms in ((old, 90.0), (new, 200.0)):
            result["systems"] |= {
                "ddp:bucket_mb=4": system(four_ms),
                "ddp:bucket_mb=1": system(100),
            }
            del result["systems"]["ddp-best"]
        new["systems"]["ddp:bucket_mb=2"] = system(100)
        new["systems"] = {name: new["systems"][name] for name in new_systems.split()}
        [change] = [change for change in changes(old, new) if change.figure.startswith("time")]
        return change.figure, change.old, change.new

    every = "bytesched ddp:bucket_mb=1 ddp:bucket_mb=4 ddp"
    multiple = "time, as a multiple of {}'s".format
    assert of(every) == (multiple("ddp:bucket_mb=4"), pytest.approx(80 / 90), pytest.approx(0.4))
    without_4 = multiple("ddp:bucket_mb=1"), pytest.approx(0.8), pytest.approx(0.8)
    assert of("bytesched ddp:bucket_mb=1 ddp") == without_4
    assert of("bytesched ddp:bucket_mb=2 ddp")[0] == multiple("ddp")
    with pytest.raises(ConfigError, match="time of bytesched: they have no peer of it in"):
        of("bytesched ddp:bucket_mb=2")


def test_what_only_the_old_result_has_is_not_compared() -> None:
    old = a_result(messages=3)
    with pytest.raises(ConfigError, match="cannot compare the messages of an iteration of bytes"):
        report(old, a_result())
    without_losses = a_result(messages=3)
    del without_losses["systems"]["bytesched"]["losses"]
    with pytest.raises(ConfigError, match="cannot compare the losses and weights that"):
        report(old, without_losses)
    del without_losses["systems"]["bytesched"]
    with pytest.raises(ConfigError, match="cannot compare bytesched: only the old result has it"):
        report(old, without_losses)
    others = a_result() | {"systems": {"horovod": {}}}
    with pytest.raises(ConfigError, match="no figure of a system in common"):
        report(others, a_result())


def test_the_report_names_runs_systems_and_regressions() -> None:
    new = a_result(100.0)
    new["systems"]["fsdp2"] = new["systems"].pop("ddp")
    text, worse = report(a_result(), new)
    assert "old: 2026-11-24T00:00:00+00:00, 012345678 with changes, 2 x Some CPU" in text
    assert "ddp is in one of them alone" in text
    assert "fsdp2 is in one of them alone" in text
    assert len(worse) == 1
    assert (
        "regression: bytesched: time, as a multiple of ddp-best's: 0.8 was, 1 is (+25.0 %" in text
    )


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    for path in (old, new):
        path.write_text(json.dumps(a_result()))
    return old, new


def test_the_command_compares_two_files(files: tuple[Path, Path], said: Callable[..., str]) -> None:
    old, new = files
    assert "no regression" in said("bench --compare", old, new)
    new.write_text(json.dumps(a_result(90.0)))
    assert "regression: bytesched: time" in said("bench --compare", old, new, code=1)
    assert "takes one file, or two" in said("bench --compare", old, new, "third.json", code=2)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"setting": {"rate": "1gbit", "clip": 1.0}}, "clip was 0.0 and is 1.0 now"),
        ({"setting": {"rate": "1gbit"}}, "clip was 0.0 and is not set now"),
        ({"network": "loopback"}, "network was links of 1 Gbit/s between emulated hosts and is"),
        ({"systems": 3}, "not a result"),
        ({"systems": {}}, "cannot compare bytesched"),
        ({"stopped": True}, "new.json: this bench was stopped"),
    ],
)
def test_the_command_refuses_another_setting_and_a_bench_that_was_stopped(
    changed: dict[str, Any], message: str, files: tuple[Path, Path], said: Callable[..., str]
) -> None:
    old, new = files
    new.write_text(json.dumps(a_result() | changed))
    assert message in said("bench --compare", old, new, code=2)


@pytest.mark.parametrize("systems", ["ddp", "ddp,bytesched"])
def test_what_cannot_be_compared_after_it_was_measured_is_no_regression(
    systems: str,
    files: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    said: Callable[..., str],
) -> None:
    """Of systems that are not asked for, that is known before."""
    measured: list[dict[str, Any]] = []

    def measure(*_: Any) -> dict[str, Any]:
        measured.append(a_result() | {"network": "loopback"})
        return measured[0]

    monkeypatch.setattr(bench, "setting", lambda *_: a_result()["setting"])
    monkeypatch.setattr(bench, "measure_systems", measure)
    told = said("bench --compare", files[0], "--systems", systems, code=2)
    is_measured = systems != "ddp"
    assert bool(measured) == is_measured
    assert ("network was links" if is_measured else "cannot compare bytesched") in told


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file"), ("{", "Expecting property name"), ("[]", "not a result")],
)
def test_files_of_another_kind_are_refused(
    content: str | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "file.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_result(path)


@pytest.mark.parametrize(
    ("first", "losses", "said"),
    [
        ([1.0, 2.0], [1.0, 2.0], "identical"),
        ([1.0, 2.0], [1.0, 2.5], "differ by 2.5e-01"),
        ([1.0, 2.0], [1.0, math.inf], "differ by inf"),
        ([1.0, 2.0], [math.nan, 2.0], "differ by inf"),
        ([math.inf, 1.0], [5.0, 1.0], "differ by inf"),
        ([], [], "identical"),
    ],
)
def test_losses_are_compared_with_those_of_the_first_system(
    first: list[float], losses: list[float], said: str
) -> None:
    systems = {
        name: {"rounds": [{"losses": [ours], "weights": "alike"}]}
        for name, ours in (("ddp", first), ("bytesched", losses))
    }
    assert figures._agreement("bytesched", systems) == said
