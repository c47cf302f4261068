"""What a bench measures, in which order, and what the kernel tells: memory, cores, links."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bytesched.bench.specification import Specification, bench_parser, specification
from bytesched.bench.systems import SYSTEMS
from bytesched.environment import RankView
from bytesched.plugins.bench.block import (
    core_times,
    peak_bytes,
    reset_peak,
    state_bytes,
    stolen_share,
)
from bytesched.plugins.bench.link import SETTLING_PROBES, agree, settled
from bytesched.plugins.bench.worker import estimate, first_round


def test_a_peak_is_seen_after_it_is_over() -> None:
    began = reset_peak()
    size = 64 << 20
    bytearray(size)[::4096] = b"x" * (size // 4096)
    assert peak_bytes() - began >= size // 2


def test_state_is_that_of_the_optimizer() -> None:
    parameter = torch.nn.Parameter(torch.zeros(10))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    assert state_bytes(optimizer) == 0
    parameter.grad = torch.ones(10)
    optimizer.step()
    assert state_bytes(optimizer) == parameter.nbytes


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
    # Cores that did nothing lost nothing.
    assert stolen_share((1,) * 8, (1,) * 8) == 0.0


def test_a_link_whose_first_measurements_are_off_is_measured_until_two_agree() -> None:
    rates: Iterator[float] = iter([40e6, 71e6, 118e6, 119e6, 60e6])

    assert settled(lambda: next(rates)) == [118e6, 119e6]
    assert next(rates) == 60e6


def test_a_link_that_never_settles_is_measured_a_few_times() -> None:
    rates = iter([50e6, 100e6] * SETTLING_PROBES)

    last = settled(lambda: next(rates))
    assert last == [50e6, 100e6]
    assert not agree(*last)
    assert len(list(rates)) == SETTLING_PROBES


def asked_for(arguments: str) -> Specification:
    options: argparse.Namespace = bench_parser().parse_args(arguments.split())
    return specification(options, RankView("none", 0, 0, 1))


def test_the_first_round_begins_with_ours_and_plain_and_ends_with_what_is_swept() -> None:
    assert [SYSTEMS[place] for place in first_round(SYSTEMS)] == [
        "bytesched",
        "ddp",
        "fsdp2",
        "ddp-best",
    ]
    assert first_round(["horovod:cycle_ms=5", "horovod", "bytesched-horovod"]) == [2, 1, 0]


def test_the_estimate_counts_every_iteration() -> None:
    spec = asked_for("--emulate gpt --iterations 20 --rounds 3 --warmup 5 --sweep-iterations 8")
    # 4 systems of 3 rounds of 26 iterations, and 12 blocks of 11 for the buckets.
    assert estimate(spec, 0.5).startswith("estimate: 3.7 min, for 444 iterations of at most 500 ms")
    alone = asked_for("--emulate gpt --systems ddp --iterations 9 --rounds 1 --warmup 5")
    assert " 15 iterations " in estimate(alone, 0.1)
