"""The burst runtime: any plan trains as data parallelism does."""

from __future__ import annotations

import json
from pathlib import Path

import burst_cases as cases
import pytest
from raised import check_survivors
from ranks import Ranks, run_fresh

from bytesched.trace.reading import merge_traces, read_traces
from bytesched.trace.timeline import trace_name


@pytest.mark.parametrize("name", cases.CASES)
@pytest.mark.one_in(2)
def test_a_plan_trains_as_data_parallelism_does(name: str, four_ranks: Ranks) -> None:
    figures = four_ranks.run(cases.equals_data_parallel, name)
    if name == "vgg-uniform":
        assert figures[0]["move_bytes"] == 0
        assert figures[0]["mode/0-3"] == "cross"
    elif name == "vgg-on-two-ranks":
        assert figures[0]["move_bytes"] == 0
        assert figures[0]["mode/0-1"] == "cross"
    else:
        assert figures[0]["move_bytes"] > 0
        assert figures[3]["move_wait_ms"] > 0


def test_samples_may_have_another_size_in_each_step(four_ranks: Ranks) -> None:
    four_ranks.run(cases.equals_data_parallel, "resnet", (8, 12))


def test_a_rank_that_closes_waits_for_those_that_are_behind(four_ranks: Ranks) -> None:
    changes = four_ranks.run(cases.closes_while_another_is_behind)
    assert all(changes[0])


def test_training_begins_with_the_weights_of_rank_0(four_ranks: Ranks) -> None:
    first, *others = four_ranks.run(cases.first_weights_are_rank_0s)
    assert others == [first] * 3


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("ranks", "planned for ranks 0 to 7, and there are 4 ranks"),
        ("first", "a model begins with a layer"),
        ("length", "the plan has 3 layers for the model, which has 4"),
        ("norm", "use nn.GroupNorm"),
        ("shared", "2 and 3 share a parameter"),
        ("join", "the join of 1 is planned for ranks 0 to 7, and there are 4 ranks"),
        ("plans", "MismatchError: the ranks disagree: rank 0 has '1: Place(first=0, width=2)'"),
        ("models", "MismatchError: the ranks disagree: rank 0 has '2.1.weight (32, 64)"),
        ("settings", "rank 0 has \"compression = 'none'\", rank 3 has \"compression = 'bf16'\""),
    ],
)
def test_what_cannot_be_run_is_refused(what: str, message: str, four_ranks: Ranks) -> None:
    for said in four_ranks.run(cases.refused, what):
        assert message in said
        assert "and left" not in said


def test_a_first_broadcast_that_fails_leaves_nothing_open(four_ranks: Ranks) -> None:
    *others, failed = four_ranks.run(cases.first_broadcast_fails)
    assert failed == "MemoryError: no room and left 0 threads"
    for said in others:
        assert "rank 3 said: MemoryError: no room" in said
        assert said.endswith("and left 0 threads")


def test_a_closed_burst_says_so(four_ranks: Ranks) -> None:
    for rank, said in enumerate(four_ranks.run(cases.used_after_it_was_closed)):
        assert said == [
            f"SchedulerClosed: rank {rank}: {what}() of a closed Burst; make a new one"
            for what in ("step", "forward", "gather")
        ]


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.one_in(2)
def test_a_last_step_that_is_lost_is_raised_or_fails_the_process(is_known: bool) -> None:
    loses = cases.loses_its_last_step
    for exited in run_fresh(loses, 4, timeout_s=40.0, args=(True, is_known)):
        assert (exited.code, exited.stdout) == (0, "PeerLost: rank 9 is gone\n"), exited.stderr
    for exited in run_fresh(loses, 4, timeout_s=40.0, args=(False, is_known)):
        assert exited.code == 1, exited.stderr
        assert "the last step could not be applied" in exited.stderr


def test_what_a_step_has_raised_is_not_raised_again() -> None:
    for exited in run_fresh(cases.raised_by_its_step, 4, timeout_s=40.0):
        assert (exited.code, exited.stdout) == (0, "PeerLost: rank 9 is gone\n"), exited.stderr


def test_a_rank_without_an_optimizer_is_heard_of_at_once(four_ranks: Ranks) -> None:
    *others, failed = four_ranks.run(cases.makes_no_optimizer)
    assert failed == "RuntimeError: no optimizer"
    for said in others:
        assert said == (
            "PluginError: rank 3 could not make its optimizers: RuntimeError: no optimizer"
        )


def test_the_background_changes_nothing_and_learns_as_alone(
    four_ranks: Ranks, tmp_path: Path
) -> None:
    steps = four_ranks.run(cases.shares_its_gaps, str(tmp_path))
    assert sum(steps) > 0
    merged, complaints = merge_traces(sorted(tmp_path.glob(trace_name("*"))))
    assert not complaints
    (tmp_path / "run.json").write_text(json.dumps({"traceEvents": merged}))
    for trace, ran in zip(read_traces(tmp_path / "run.json"), steps, strict=True):
        assert len(trace.iterations()) == cases.SHARED_STEPS - 1
        assert len(trace.track("background")) == ran
        sent = {span.name for span in trace.track("send")}
        # A move each way, and gradients of the layers that are on several ranks.
        assert {"to 1", "from 1"} <= sent
        assert any("weight" in name or "bias" in name for name in sent)


@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.one_in(2)
def test_when_a_rank_dies_the_others_say_so(victim: int) -> None:
    ended = run_fresh(cases.loses_a_rank, 4, timeout_s=40.0, args=(victim,))
    for rank, exited in enumerate(ended):
        assert exited.code == (cases.DIED if rank == victim else 0), exited.stderr
        assert rank == victim or exited.stdout.startswith(("PeerLost: ", "SchedulerTimeout: "))


@pytest.mark.nightly
def test_a_rank_that_dies_in_the_middle_of_the_last_move_is_missed() -> None:
    check_survivors(run_fresh(cases.dies_while_it_receives, timeout_s=45.0), victim=0)


def test_an_error_of_one_rank_ends_the_others(four_ranks: Ranks) -> None:
    said = four_ranks.run(cases.raises_on_one_rank)
    assert said[2] == "RuntimeError: out of luck"
    assert all("PeerLost" in said[rank] for rank in (0, 1, 3)), said


def test_a_rank_that_stays_away_is_not_waited_for_without_end(four_ranks: Ranks) -> None:
    said = four_ranks.run(cases.is_kept_waiting)
    assert all(text.startswith(("SchedulerTimeout", "PeerLost")) for text in said), said
    assert any(text.startswith("SchedulerTimeout") for text in said[:3]), said


def test_a_rank_that_never_comes_is_not_waited_for_without_end(four_ranks: Ranks) -> None:
    said = four_ranks.run(cases.does_not_come)
    assert said[3] == "RuntimeError: lost"
    assert all(text.startswith(("SchedulerTimeout", "PeerLost")) for text in said[:3]), said
    assert any(text.startswith("SchedulerTimeout") for text in said[:3]), said


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.one_in(2)
def test_a_rank_that_cannot_connect_is_heard_of_at_once(at: int, four_ranks: Ranks) -> None:
    *others, failed = four_ranks.run(cases.does_not_connect, at)
    assert failed == "MemoryError: no room"
    for said in others:
        assert said.startswith("PeerLost")
        assert "rank 3 said: MemoryError: no room" in said
        assert "and left" not in said


def test_a_rank_that_dies_while_others_connect_is_missed_at_once() -> None:
    check_survivors(run_fresh(cases.dies_while_others_connect, 4, timeout_s=40.0), code=cases.DIED)
