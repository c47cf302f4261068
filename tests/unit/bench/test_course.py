"""What a bench measures first, and how long it says that it will take."""

from __future__ import annotations

import argparse

from bytesched.bench.specification import Specification, bench_parser, specification
from bytesched.bench.systems import SYSTEMS
from bytesched.environment import RankView
from bytesched.plugins.bench.worker import estimate, first_round


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
