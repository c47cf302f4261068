"""Two pipelines of two ranks: stages that are replicated train as if reduced at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pipeline_cases import (
    crosses_the_barrier,
    ddp_alone,
    ends_with_its_schedule,
    evaluated_by_another_schedule,
    follows_a_planned_order,
    optimizer_for_each_stage,
    trains_as_plain,
    trains_in_two_levels,
    trains_the_example,
    unchanged_script,
    unwrapped_in_the_middle,
)
from pipeline_models import SPLIT
from ranks import Ranks, run_fresh

from bytesched.commands.pipeline import main

pytestmark = pytest.mark.procs

KINDS = [
    "gpipe",
    "1f1b",
    "gpipe, one micro-batch",
    "interleaved",
    "interleaved zb",
    "zbv",
    "dualpipev",
    "csv",
    "csv split",
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_schedule_trains_as_reduced_at_the_end(kind: str, four_ranks: Ranks) -> None:
    assert four_ranks.run(trains_as_plain, kind) == [[]] * 4


@pytest.mark.parametrize("kind", ["1f1b", "interleaved", "zbv", "csv split"])
def test_all_gradients_may_cross_the_barrier(kind: str, four_ranks: Ranks) -> None:
    assert four_ranks.run(crosses_the_barrier, kind) == [[]] * 4


@pytest.mark.parametrize(
    "kind", ["gpipe on one rank", "interleaved on one rank", "csv split on one rank"]
)
@pytest.mark.parametrize("way", ["schedule", "ddp", "named"])
def test_a_rank_may_have_all_stages(kind: str, way: str, two_ranks: Ranks) -> None:
    assert two_ranks.run(trains_as_plain, kind, way) == [[], []]


@pytest.mark.parametrize("kind", ["1f1b", "csv", "csv split"])
@pytest.mark.parametrize("way", ["ddp", "named", "modules"])
def test_however_the_stages_are_given(kind: str, way: str, four_ranks: Ranks) -> None:
    assert four_ranks.run(trains_as_plain, kind, way) == [[]] * 4


SCRIPTS = [
    "accumulates",
    "clips",
    "reads",
    "shares",
    "leaves out",
    "keeps zeros",
    "has a closure",
    "sums losses",
    "is frozen in part",
    "is in bfloat16",
    "scales losses",
]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("kind", ["csv", "csv split"])
def test_whatever_the_script_does_between(kind: str, script: str, four_ranks: Ranks) -> None:
    assert four_ranks.run(trains_as_plain, kind, "schedule", script) == [[]] * 4


@pytest.mark.parametrize(
    "fields", [{"tune": True, "partition_bytes": 0, "credit_bytes": 0}, {"policy": "fifo"}]
)
@pytest.mark.parametrize("script", ["", "clips"])
def test_whatever_carries_the_gradients(
    fields: dict[str, Any], script: str, four_ranks: Ranks
) -> None:
    found = four_ranks.run(trains_as_plain, "csv split", "schedule", script, "adamw", fields)
    assert found == [[]] * 4


@pytest.mark.parametrize("wire", ["fp16", "bf16"])
@pytest.mark.parametrize("kind", ["csv", "csv split"])
def test_compressed_as_by_hooks_of_ddp(kind: str, wire: str, four_ranks: Ranks) -> None:
    fields = {"compression": wire}
    found = four_ranks.run(trains_as_plain, kind, "schedule", f"sends {wire}", "momentum", fields)
    assert found == [[]] * 4


@pytest.mark.parametrize("kind", ["gpipe on one rank", "csv split on one rank"])
def test_in_two_levels(kind: str, four_ranks: Ranks) -> None:
    four_ranks.run(trains_in_two_levels, kind)


def test_what_torch_does_without_it(four_ranks: Ranks) -> None:
    """If this fails, DDP has learned to reduce weight gradients that are computed apart."""
    assert max(four_ranks.run(ddp_alone, "csv")) < 1e-6
    assert max(four_ranks.run(ddp_alone, "csv split")) > 1e-2


@pytest.mark.parametrize("kind", ["1f1b", "csv split"])
def test_under_bytesched_run(kind: str) -> None:
    for rank in run_fresh(unchanged_script, 4, 60, {"BYTESCHED_PARTITION_BYTES": "256"}, (kind,)):
        assert rank.code == 0, rank.stderr
        assert rank.stdout == "cross True\n", rank.stderr
        assert ("it reduces none of them" in rank.stderr) == (kind == "csv split")


@pytest.mark.parametrize("kind", ["1f1b", "csv split"])
def test_unwrapped_in_the_middle(kind: str, four_ranks: Ranks) -> None:
    assert four_ranks.run(unwrapped_in_the_middle, kind) == [True] * 4


def test_a_session_ends_with_its_schedule(four_ranks: Ranks) -> None:
    assert four_ranks.run(ends_with_its_schedule) == [([], False)] * 4


def test_an_optimizer_for_each_stage_and_evaluation(four_ranks: Ranks) -> None:
    assert four_ranks.run(optimizer_for_each_stage) == [True] * 4


@pytest.mark.parametrize("searched", [False, True])
def test_the_example(searched: bool, four_ranks: Ranks, tmp_path: Path) -> None:
    order = tmp_path / "order.csv"
    order.write_text("".join(f"{row}\n" for row in SPLIT))
    found = four_ranks.run(trains_the_example, str(order) if searched else "", str(tmp_path))
    assert found == [True] * 4


@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_another_schedule_evaluates(when: str, four_ranks: Ranks) -> None:
    assert four_ranks.run(evaluated_by_another_schedule, when) == [True] * 4


@pytest.mark.parametrize("options", ["", "--split-backward", "--placement interleaved"])
def test_torch_runs_a_planned_order_unchanged(
    options: str, four_ranks: Ranks, tmp_path: Path
) -> None:
    path = tmp_path / "order.csv"
    times = "--forward-ms 1 --backward-ms 2 --ranks 2 --microbatches 4 --time-limit-s 10"
    assert main(["plan", *times.split(), *options.split(), "--csv", str(path)]) == 0
    assert max(four_ranks.run(follows_a_planned_order, str(path))) < 1e-6
