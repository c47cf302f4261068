"""What follows from times that were measured, and the table of it."""

from __future__ import annotations

from typing import Any

import pytest
from bench_results import bench_result

from bytesched.bench.figures import add_figures, interval, opponents, percentile
from bytesched.bench.table import table

TIMES_MS = {
    "ddp": (200, 220),
    "ddp-best": (160, 176),
    "bytesched": (128, 144),
    "horovod": (200, 240),
    "horovod:fusion-mb=4": (180, 170),
    "bytesched-horovod": (120, 112),
    "horovod:fusion-mb=9": (160, 168),
    "fsdp2": (240, 264),
}


def test_systems_are_compared_with_peers_of_their_framework_within_rounds() -> None:
    result = bench_result(TIMES_MS)
    systems = result["systems"]
    add_figures(result)
    assert opponents("bytesched-horovod", systems) == ("horovod", "horovod:fusion-mb=9")
    ours, over_horovod = (systems[n]["figures"] for n in ("bytesched", "bytesched-horovod"))
    assert ours["iteration_ms"] == 136
    assert ours["to_optimum"] == pytest.approx(136 / 120)
    assert ours["speedup_over_plain"] == pytest.approx((200 / 128 + 220 / 144) / 2)
    assert ours["speedup_over_best"] == pytest.approx((160 / 128 + 176 / 144) / 2)
    assert ours["share_of_possible_gain"] == pytest.approx(32 / (168 - 120))
    assert ours["bus_mb_per_s"] == pytest.approx(10 / 0.136)
    assert over_horovod["speedup_over_plain"] == pytest.approx((200 / 120 + 240 / 112) / 2)
    assert over_horovod["speedup_over_best"] == pytest.approx((160 / 120 + 168 / 112) / 2)
    assert over_horovod["share_of_possible_gain"] == pytest.approx(48 / 44)
    for name in ("ddp", "horovod:fusion-mb=4"):
        assert "share_of_possible_gain" not in systems[name]["figures"]
    assert result["compute"]["communication_to_compute"] == 1.25
    text = table(result)
    assert "vs best: how many times as fast as ddp-best or horovod:fusion-mb=9" in text
    assert max(map(len, text.splitlines())) <= 160


def test_without_a_peer_at_its_best_there_is_no_such_column() -> None:
    result = bench_result({"ddp": (200, 200), "bytesched": (150, 150)})
    add_figures(result)
    assert "speedup_over_best" not in result["systems"]["bytesched"]["figures"]
    text = table(result)
    assert "vs plain" in text
    assert "vs best" not in text


def test_figures_of_servers() -> None:
    times_ms = {"kv-plain": [300.0], "kv-p3": [200.0], "bytesched-kv:updates=1": [160.0]}
    result = bench_result(times_ms, servers=1, nominal_bytes_per_s=100e6)
    add_figures(result)
    assert opponents("bytesched-kv:updates=1", result["systems"]) == ("kv-plain", "kv-p3")
    ours = result["systems"]["bytesched-kv:updates=1"]["figures"]
    assert ours["speedup_over_plain"] == pytest.approx(300 / 160)
    assert ours["speedup_over_best"] == pytest.approx(200 / 160)
    assert ours["share_of_possible_gain"] == pytest.approx(40 / 80)
    assert ours["duplex_share"] == pytest.approx(100 / 160)
    text = table(result)
    assert "duplex" in text
    assert "bus MB/s" not in text


def test_on_one_device_the_best_other_counts_and_what_was_computed_alike() -> None:
    times_ms = {"ddp:bucket_mb=4": (105, 105), "fsdp2": (84, 84), "bytesched": (80, 80)}
    result = bench_result(times_ms, device="a GPU")
    del result["compute"]["update_ms"]
    for system in result["systems"].values():
        system["compared"] = dict(system["rounds"][0])
        # Kernels that do not give the same bits each time.
        for turn in system["rounds"]:
            turn["losses"] = [[3.0, float(id(turn))]]
    result["systems"]["bytesched"]["trace"] = {
        "chunks": [["weight", 2.0, 3.5]],
        "gates": [["layer", 4.0, 6.0]],
        "passes": [["backward", 0.0], ["step", 3.0]],
    }
    add_figures(result)
    text = table(result).splitlines()
    assert "compute 80.0 ms with the update; T* 120.0 ms" in text
    rows = {line.split()[0]: " ".join(line.split()[5:]) for line in text if "identical" in line}
    assert list(rows) == list(times_ms)
    assert rows["ddp:bucket_mb=4"].startswith("0.875 0.80x 0.")
    assert rows["fsdp2"].startswith("0.700 1.00x - ")
    assert rows["bytesched"].startswith("0.667 1.05x 1.0")
    assert ["weight", "2.0", "3.5"] in [line.split() for line in text]
    assert ["layer", "4.0", "6.0"] in [line.split() for line in text]


def test_an_interval_holds_the_ratio() -> None:
    low, high = interval([[10.0, 11, 12], [10, 12, 13]], [[5.0, 5.5, 6], [5, 6, 6.5]])
    assert 1.5 < low <= 2 <= high < 2.5
    assert interval([[4.0]], [[2.0]]) == (2, 2)


def test_percentiles() -> None:
    assert percentile(range(1, 101), 0.95) == 95
    assert percentile([7.0], 0.95) == 7.0
    assert percentile([], 0.5) == 0.0


def test_time_that_the_host_withheld_is_told() -> None:
    result = bench_result(TIMES_MS, stolen_share=0.124)
    add_figures(result)
    assert "12% of the time in which the cores had work was withheld" in table(result)
    result["stolen_share"] = 0.01
    assert "withheld" not in table(result)


def test_sharded_updates_are_compared_with_the_best_of_their_kind() -> None:
    name = "bytesched:policy=fifo+shard=yes"
    result = bench_result({"ddp": (200, 220), "bytesched": (136, 136), name: (136, 136)})
    stats: dict[str, Any] = {"mode": "cross", "order": "planned", "partition_bytes": 1e6}
    stats |= {"credit_bytes": 1e6, "barrier_crossed_pct": 50.0, "exposed_comm_ms": 1.0}
    for system in result["systems"].values():
        system["rounds"][-1]["stats"] = stats
    add_figures(result)
    (line,) = (line for line in table(result).splitlines() if "sharded update" in line)
    assert line.startswith(f"{name}: mode cross")
    assert line.endswith(", 1.000 x T* of a sharded update")


def test_a_bench_that_was_stopped_has_a_table() -> None:
    result = bench_result({"ddp": (200,), "bytesched": (128, 144)})
    add_figures(result)
    ours = result["systems"]["bytesched"]["figures"]
    assert ours["speedup_over_plain"] == pytest.approx(200 / 128)
    assert "bytesched" in table(result)


def test_the_table_says_whether_the_losses_agree() -> None:
    result = bench_result(TIMES_MS)
    result["systems"]["bytesched"]["rounds"][1]["weights"] = ["a", "b"]
    for turn in result["systems"]["fsdp2"]["rounds"]:
        turn["losses"] = [[3.0, 2.0002], [3.5, 2.5]]
    add_figures(result)
    lines = {line.split()[0]: line for line in table(result).splitlines() if line}
    assert lines["ddp-best"].endswith("identical")
    assert lines["bytesched"].endswith("equal, weights not")
    assert lines["fsdp2"].endswith("differ by 1.0e-04")
