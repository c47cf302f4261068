"""Stages: what they take and hold, how a chain is cut, and which rank has which."""

from __future__ import annotations

from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytesched.bench.profile import load_profile
from bytesched.errors import ConfigError
from bytesched.pipeline.order import Kind
from bytesched.pipeline.stages import (
    Link,
    Pipeline,
    Stage,
    cut,
    load_chain,
    partition,
    placed,
    read_placement,
)
from bytesched.pipeline.ticks import Ticks


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.data())
def test_no_cut_has_a_faster_slowest_part(times: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(times)))
    bounds = partition(len(times), parts, lambda start, stop: float(sum(times[start:stop])))
    assert (len(bounds), bounds[0], bounds[-1]) == (parts + 1, 0, len(times))
    assert all(start < stop for start, stop in pairwise(bounds))
    slowest = min(
        max(sum(times[a:b]) for a, b in pairwise((0, *cuts, len(times))))
        for cuts in combinations(range(1, len(times)), parts - 1)
    )
    chain = [Stage(float(time), 0.0, 0.0, 1, n, 2) for n, time in enumerate(times)]
    stages = cut(chain, parts)
    assert max(stage.forward_s for stage in stages) == slowest
    assert [sum(times[a:b]) for a, b in pairwise(bounds)] == [stage.forward_s for stage in stages]
    assert sum(stage.activation_bytes for stage in stages) == len(times)
    assert sum(stage.parameter_bytes for stage in stages) == 2 * len(times)
    # What a stage hands on is what its last layer hands on.
    assert stages[-1].output_bytes == len(times) - 1


def test_more_stages_than_layers() -> None:
    with pytest.raises(ConfigError, match="2 layers cannot be cut into 3 stages"):
        cut([Stage(1, 1, 1)] * 2, 3)


def test_the_first_stage_has_no_gradient_of_its_input() -> None:
    pipeline = Pipeline((Stage(1, 2, 3),) * 2, (0, 1))
    assert pipeline.kinds(0, True) == (Kind.FORWARD, Kind.BACKWARD)
    assert pipeline.kinds(1, True) == (Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
    taken = [[pipeline.seconds(stage, kind) for kind in Kind] for stage in range(2)]
    assert taken == [[1, 5, 0, 5], [1, 5, 2, 3]]


def test_what_travels() -> None:
    stages = (Stage(1, 1, 1, 0, 6, 12), Stage(1, 1, 1, 0, 4, 8), Stage(1, 1, 1))
    pipeline = Pipeline(stages, (0, 1, 1), Link(2.0, 0.5), 4)
    assert [pipeline.crossing_s(*pair) for pair in ((0, 1), (1, 0), (1, 2))] == [3.5, 3.5, 0]
    # A ring over four takes 2 * 3/4 of the bytes across each link.
    assert [pipeline.reduction_s(stage) for stage in range(3)] == [9, 6, 0]


def test_times_that_have_no_common_measure_are_rounded() -> None:
    exact = Ticks.of(Pipeline((Stage(0.1, 0.2, 0.3),) * 2, (0, 1)), True)
    assert exact.exact
    assert [block.duration for block in exact.blocks] == [1, 1, 2, 3, 5]
    rounded = Ticks.of(Pipeline((Stage(0.1, 0.2001, 0.300003),) * 2, (0, 1)), True)
    assert not rounded.exact
    for block, exactly_s in zip(
        rounded.blocks, [0.1, 0.1, 0.2001, 0.300003, 0.500103], strict=True
    ):
        assert abs(block.duration * rounded.tick_s - exactly_s) <= rounded.tick_s / 2


def test_placements() -> None:
    assert placed("interleaved", 2, 2) == (0, 1, 0, 1)
    assert placed("v", 3, 2) == (0, 1, 2, 2, 1, 0)
    assert placed("v", 2, 3) == (0, 1, 1, 0, 0, 1)
    with pytest.raises(ConfigError, match="torch puts a stage on one rank"):
        placed("x", 2, 2)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[0, 1", "is not valid JSON"),
        ("[]", r"is \[\], expected a list"),
        ('{"0": 1}', "expected a list"),
        ("[0, [1, 0]]", r"stage 1 is on \[1, 0\]; torch puts a stage on one rank"),
        ("[0, 2]", "stage 1 is on 2; torch puts a stage on one rank, from 0 to 1"),
        ("[0, true]", "stage 1 is on True"),
        ("[0, 0]", "rank 1 has no stage"),
    ],
)
def test_what_is_no_placement(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "placement.json"
    path.write_text("[0, 1, 1]")
    assert read_placement(str(path), 2) == (0, 1, 1)
    path.write_text(text)
    with pytest.raises(ConfigError, match=told):
        read_placement(str(path), 2)


@pytest.mark.parametrize(
    ("stage", "told"),
    [
        ("3", "stage 0: it is 3"),
        ('{"backward_s": 1}', "stage 0: it needs 'forward_s'"),
        ('{"forward_s": -1, "backward_s": 1}', "times are expected from 0"),
        ('{"forward_s": NaN, "backward_s": 1}', "times are expected from 0"),
        ('{"forward_s": 1, "backward_input_s": 1}', "or one of its halves, backward_input_s"),
        ('{"forward_s": 0, "backward_s": 0}', "every stage takes 0 s"),
        ('{"forward_s": 1, "backward_s": 1, "activation_bytes": 1.5}', "activation_bytes is 1.5"),
        ('{"forward_s": 1, "backward_s": 1, "actvation_bytes": 1}', "it has no 'actvation_bytes'"),
        (
            '{"forward_s": 1, "backward_s": 1, "backward_input_s": 1}',
            "stage 0: backward_s is there beside its halves",
        ),
    ],
)
def test_what_is_no_stage(stage: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "stages.json"
    path.write_text(f'{{"stages": [{stage}]}}')
    with pytest.raises(ConfigError, match=told):
        load_chain(str(path))


def test_stages_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "stages.json"
    path.write_text(
        '{"stages": [{"forward_s": 1, "backward_s": 3, "output_bytes": 5},'
        '{"forward_s": 1, "backward_input_s": 1, "backward_weight_s": 2, "parameter_bytes": 7,'
        '"name": "head"}]}'
    )
    assert load_chain(str(path)) == (Stage(1, 1.5, 1.5, 0, 5, 0), Stage(1, 1, 2, 0, 0, 7))


def test_a_shipped_profile_is_a_chain() -> None:
    chain = load_chain("gpt")
    assert sum(stage.compute_s for stage in chain) == pytest.approx(load_profile("gpt").compute_s)
    assert all(stage.activation_bytes == stage.output_bytes for stage in chain)
