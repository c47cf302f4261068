"""Horovod in the bench: settings and figures."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from bench_results import bench_result

from bytesched.bench.table import add_figures, opponents, table
from bytesched.commands import bench as bench
from bytesched.errors import ConfigError
from bytesched.lab import ranks as lab_ranks

needs_horovod = pytest.mark.needs("horovod")


@needs_horovod
def test_mpi_needs_its_mpirun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bytesched.lab.ranks.shutil.which", lambda *_, **__: None)
    with pytest.raises(SystemExit):
        bench.main(["--systems", "horovod", "--controller", "mpi"])
    assert "needs mpirun" in capsys.readouterr().err


def test_without_horovod_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        "bytesched.bench.systems.importlib.util.find_spec",
        lambda name: None if name == "horovod" else real(name),
    )
    with pytest.raises(SystemExit):
        bench.main(["--systems", "horovod"])
    assert "pip install 'bytesched[horovod]'" in capsys.readouterr().err


def test_another_mpi_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "mpirun"
    other.write_text("#!/bin/sh\necho Intel MPI\n")
    other.chmod(0o755)
    monkeypatch.setattr("bytesched.lab.ranks.shutil.which", lambda *_, **__: str(other))
    with pytest.raises(ConfigError, match="is not Open MPI"):
        lab_ranks.find_mpirun()


@needs_horovod
def test_settings_become_variables_and_the_rest_are_bytescheds() -> None:
    from bytesched.plugins.bench.systems.horovod import split_options

    variables, left = split_options({"fusion_mb": "0.5", "cycle_ms": "2", "policy": "fifo"})
    assert left == {"policy": "fifo"}
    assert variables == {"HOROVOD_FUSION_THRESHOLD": "524288", "HOROVOD_CYCLE_TIME": "2"}
    assert split_options({}) == ({}, {})
    assert split_options({"cache": "0"}) == ({"HOROVOD_CACHE_CAPACITY": "0"}, {})


def figures_of(name: str, *names: str) -> dict[str, float]:
    result = bench_result(dict.fromkeys((name, *names), (150, 150)))
    add_figures(result)
    figures: dict[str, float] = result["systems"][name]["figures"]
    return figures


def test_horovods_are_compared_with_the_fastest_plain_one() -> None:
    result = bench_result(
        {
            "ddp": (300, 300),
            "ddp-best": (140, 140),
            "bytesched": (150, 150),
            "horovod": (200, 240),
            "horovod:fusion-mb=4": (180, 170),
            "bytesched-horovod": (120, 112),
            "horovod:fusion-mb=9": (160, 168),
        }
    )
    systems = result["systems"]
    add_figures(result)
    ours = systems["bytesched-horovod"]["figures"]
    assert opponents("bytesched-horovod", systems) == ("horovod", "horovod:fusion-mb=9")
    assert ours["speedup_over_plain"] == pytest.approx((200 / 120 + 240 / 112) / 2)
    assert ours["speedup_over_best"] == pytest.approx((160 / 120 + 168 / 112) / 2)
    assert ours["share_of_possible_gain"] == pytest.approx(48 / 44)
    assert "share_of_possible_gain" not in systems["horovod:fusion-mb=4"]["figures"]
    assert systems["bytesched"]["figures"]["speedup_over_plain"] == 2
    assert systems["bytesched"]["figures"]["speedup_over_best"] == pytest.approx(140 / 150)
    assert "speedup_over_best" not in figures_of("bytesched", "ddp")
    text = table(result)
    assert "vs best: the same for ddp-best or horovod:fusion-mb=9" in text
    assert max(map(len, text.splitlines())) <= 160
