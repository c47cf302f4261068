"""The share of the cores' time that others had."""

from __future__ import annotations

from pathlib import Path

import pytest

from bytesched.plugins.bench.machine import core_times, stolen_share


def test_the_share_is_of_the_time_in_which_there_was_something_to_do(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    times = []
    for line in ("cpu  100 0 50 1000 7 0 3 20 9 0", "cpu  160 0 70 9000 9 0 3 40 9 0"):
        stat.write_text(f"{line}\ncpu0 1 2 3 4 5 6 7 8 9 10\n")
        times.append(core_times(stat))
    # 60 for users, 20 for the system, 20 stolen; idle time is nobody's.
    assert stolen_share(*times) == pytest.approx(0.2)


def test_nothing_is_known_without_such_a_file(tmp_path: Path) -> None:
    assert core_times(tmp_path / "none") == ()
    (tmp_path / "other").write_text("intr 1 2 3\n")
    assert core_times(tmp_path / "other") == ()
    assert stolen_share((), ()) == 0.0


def test_cores_that_did_nothing_lost_nothing() -> None:
    assert stolen_share((1,) * 8, (1,) * 8) == 0.0
