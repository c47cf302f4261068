"""Two pipelines of two ranks: stages that are replicated train as if reduced at the end.

What cannot be wrapped is refused on all ranks; what fails in a step is told to the others.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pipeline_cases as cases
import pipeline_faults as faults
import pytest
from pipeline_models import SPLIT
from ranks import Ranks, run_fresh

from bytesched.commands.pipeline import main

KINDS = (
    *("gpipe", "1f1b", "gpipe, one micro-batch", "interleaved", "interleaved zb"),
    *("zbv", "dualpipev", "csv", "csv split"),
)
WHAT_SCRIPTS_DO = (
    *("accumulates", "clips", "reads", "shares", "leaves out", "keeps zeros", "has a closure"),
    *("sums losses", "is frozen in part", "is in bfloat16", "scales losses"),
)
TRAININGS: list[tuple[str, dict[str, Any]]] = [
    *((kind, {}) for kind in KINDS),
    # All gradients cross the barrier.
    *((kind, {"hold": True}) for kind in ("1f1b", "interleaved", "zbv", "csv split")),
    *(
        (f"{kind} on one rank", {"way": way})
        for kind in ("gpipe", "interleaved", "csv split")
        for way in ("schedule", "ddp", "named")
    ),
    *(
        (kind, {"way": way})
        for kind in ("1f1b", "csv", "csv split")
        for way in ("ddp", "named", "modules")
    ),
    *((kind, {"script": script}) for script in WHAT_SCRIPTS_DO for kind in ("csv", "csv split")),
    *(
        ("csv split", {"script": script, "optimizer": "adamw", "fields": fields})
        for script in ("", "clips")
        for fields in ({"tune": True, "partition_bytes": 0, "credit_bytes": 0}, {"policy": "fifo"})
    ),
    # As by hooks of DDP.
    *(
        (kind, {"script": f"sends {wire}", "fields": {"compression": wire}})
        for kind in ("csv", "csv split")
        for wire in ("fp16", "bf16")
    ),
]


#: ranks find no difference in these
EQUAL: list[tuple[Any, ...]] = [
    *((cases.trains_with, *training) for training in TRAININGS),
    (cases.unwrapped_in_the_middle, "1f1b"),
    (cases.unwrapped_in_the_middle, "csv split"),
    (cases.optimizer_for_each_stage,),
    *((cases.evaluated_by_another_schedule, when) for when in ("before", "between", "after")),
]


@pytest.mark.parametrize("case", EQUAL, ids=lambda case: "-".join(map(str, case[1:])))
@pytest.mark.one_in(3)
def test_a_schedule_trains_as_reduced_at_the_end(
    case: tuple[Any, ...], two_ranks: Ranks, four_ranks: Ranks
) -> None:
    ranks = two_ranks if "on one rank" in str(case) else four_ranks
    assert ranks.run(*case) == [[]] * ranks.world_size


@pytest.mark.parametrize("kind", ["gpipe on one rank", "csv split on one rank"])
@pytest.mark.one_in(2)
def test_in_two_levels(kind: str, four_ranks: Ranks) -> None:
    four_ranks.run(cases.trains_in_two_levels, kind)


def test_what_torch_does_without_it(four_ranks: Ranks) -> None:
    """If this fails, DDP has learned to reduce weight gradients that are computed apart."""
    assert max(four_ranks.run(cases.ddp_alone, "csv")) < 1e-6
    assert max(four_ranks.run(cases.ddp_alone, "csv split")) > 1e-2


@pytest.mark.parametrize("kind", ["1f1b", "csv split"])
@pytest.mark.one_in(2)
def test_under_bytesched_run(kind: str) -> None:
    for rank in run_fresh(
        cases.unchanged_script, 4, 60, {"BYTESCHED_PARTITION_BYTES": "256"}, (kind,)
    ):
        assert rank.code == 0, rank.stderr
        assert rank.stdout == "cross True\n", rank.stderr
        assert ("it reduces none of them" in rank.stderr) == (kind == "csv split")


def test_a_session_ends_with_its_schedule(four_ranks: Ranks) -> None:
    assert four_ranks.run(cases.ends_with_its_schedule) == [([], False)] * 4


@pytest.mark.parametrize("searched", [False, True])
@pytest.mark.one_in(2)
def test_the_example(searched: bool, four_ranks: Ranks, tmp_path: Path) -> None:
    order = tmp_path / "order.csv"
    order.write_text("".join(f"{row}\n" for row in SPLIT))
    found = four_ranks.run(cases.trains_the_example, str(order) if searched else "", str(tmp_path))
    assert found == [True] * 4


@pytest.mark.parametrize("options", ["", "--split-backward", "--placement interleaved"])
@pytest.mark.one_in(3)
def test_torch_runs_a_planned_order_unchanged(
    options: str, four_ranks: Ranks, tmp_path: Path
) -> None:
    path, profile = tmp_path / "order.csv", tmp_path / "stages.json"
    profile.write_text(json.dumps({"stages": [{"forward_s": 1e-3, "backward_s": 2e-3}] * 4}))
    given = f"--profile {profile} --ranks 2 --micro-batches 4 --time-limit-s 10 -o {path}"
    assert main(["plan", *given.split(), *options.split()]) == 0
    assert max(four_ranks.run(cases.follows_a_planned_order, str(path))) < 1e-6


#: what is wrong -> what each rank is told
TOLD = {
    "another placement": "MismatchError: rank 0 has stages 0, 3 of 4, rank 2 has stages 0, 2 of 4",
    "another order": "MismatchError: the ranks disagree: ",
    "other values": "begin with different values",
    "one stage in DDP": "PluginError: 1 of 2 stages on rank ",
    "never reduced": "PluginError: the order of _PipelineScheduleRuntime never reduces stage ",
    "some modules": "PluginError: _PipelineScheduleRuntime has 2 stages on this rank, and 1 ",
    "shared device": "PluginError: share = 'jobs' is not there for pipelines",
    "folded": "PluginError: accumulate is not there for pipelines",
    "off": "PluginError: nothing would reduce the gradients of replicated stages: enabled is off",
    "off, in DDP": "no error",
    "a hook of DDP": "a communication hook is registered on the DDP module; stage ",
    "DDP's mixed precision": "wrapped: DDP's own mixed precision reduces in a hook of its own",
    "delayed by DDP": "wrapped: DDP delays the all-reduce of some parameters",
    "FSDP": " is sharded by FSDP, which reduces gradients itself",
    "FSDP, named": " is sharded by FSDP, which reduces gradients itself",
    "FSDP1": " is sharded by FSDP, which reduces gradients itself",
    "a DTensor": ".up.bias is a DTensor, of which each rank has a part: ",
    "a DTensor, named": ".up.bias is a DTensor, of which each rank has a part: ",
    "sparse": " rank 2 cannot be wrapped: stage",
    "a mapping": "PluginError: groups is a dict: for a pipeline it is the process group",
}


@pytest.mark.parametrize("what", TOLD)
def test_what_cannot_be_wrapped(what: str, four_ranks: Ranks) -> None:
    said = four_ranks.run(faults.refused, what)
    for text in said:
        assert TOLD[what] in text


def test_a_pipeline_without_replicas_has_one_order(four_ranks: Ranks) -> None:
    said = four_ranks.run(faults.refused, "another order, no replicas")
    assert said[:2] == ["no error", "no error"]
    assert all(text.startswith("MismatchError: the ranks disagree: ") for text in said[2:]), said


def test_ranks_that_read_other_orders(four_ranks: Ranks) -> None:
    said = four_ranks.run(faults.given_other_orders)
    assert said[:2] == ["no error", "no error"]
    for text in said[2:]:
        assert text.startswith("MismatchError: the ranks disagree: rank "), said
        assert " has 'an order of 4 stages and 2 micro-batches with digest " in text


def test_an_order_that_all_ranks_load_after_wrap(four_ranks: Ranks, tmp_path: Path) -> None:
    assert four_ranks.run(faults.loaded_after_wrap, "all", str(tmp_path)) == ["no error"] * 4


def test_ranks_that_load_other_orders_after_wrap(four_ranks: Ranks, tmp_path: Path) -> None:
    said = four_ranks.run(faults.loaded_after_wrap, "one", str(tmp_path))
    assert all(text.startswith("MismatchError: the ranks disagree: ") for text in said[2:]), said
    assert all(text.startswith("PeerLost: ") for text in said[:2]), said


def test_a_module_that_became_a_stage_is_refused_when_it_is_called() -> None:
    first, _, third, _ = run_fresh(faults.wrapped_before_it_was_a_stage, 4, 60)
    for rank in (first, third):
        assert rank.code == 0, rank.stderr
        assert "was wrapped alone, and is a stage of a pipeline now" in rank.stdout, rank.stderr


@pytest.mark.parametrize("how", ["dies", "raises"])
def test_a_rank_that_ends_in_a_step(how: str) -> None:
    first, second, third, last = run_fresh(faults.ends_in_a_step, 4, 60, args=(how,))
    # Replicas, and then what the first of them has left behind.
    assert first.stdout.startswith("PeerLost: "), first
    assert "is gone" in first.stdout
    assert second.stdout.startswith("PeerLost: "), second
    assert last.stdout.startswith("PeerLost: rank of this pipeline, 2, is gone ("), last
    assert third.stdout == ("ValueError: the weather\n" if how == "raises" else "")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0F0,0B0\n1F0,oops\n", "row 2, cell 2"),
        ("0F0,0B0,1F0,1B0,2F0,2B0,3F0,3B0\n", "ConfigError: "),
        ("0F0,0B0\n1F0,1B0\n", "is of 2 stages, and the model was cut into 4"),
        (
            "0F0,2F0,2B0,0B0\n1F0,3F0,3B0,1B0\n",
            "has stages 0, 2 on rank 0 of the pipeline, which was given stages 0, 3",
        ),
        ("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n", "no error"),
    ],
)
def test_a_foreign_order(text: str, said: str, four_ranks: Ranks, tmp_path: Path) -> None:
    first, *_ = four_ranks.run(faults.given_an_order, text, str(tmp_path / "order.csv"))
    assert said in first


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("custom function", "was not reduced on rank"),
        ("another schedule", "runs in another schedule than the one that was wrapped"),
        ("another module", "its module was replaced, by a Sequential"),
        ("thawed", "parameters have gradients that required none when it was wrapped"),
    ],
)
@pytest.mark.one_in(2)
def test_what_would_not_be_reduced_is_an_error(how: str, said: str) -> None:
    ended = run_fresh(faults.misused, 4, 60, args=(how,))
    assert any(said in rank.stdout for rank in ended), ended
    # Who hears of it from its replicas first has their error; from its pipeline, that of torch.
    for rank in ended:
        is_named = rank.stdout.startswith(("PluginError: ", "PeerLost: "))
        assert is_named or "by peer" in rank.stderr, ended
