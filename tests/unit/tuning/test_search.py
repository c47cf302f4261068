"""The search and its space: what it promises, where it begins, and what is refused before."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tuning_cluster import Cluster

from bytesched.config import Config
from bytesched.errors import ConfigError
from bytesched.link.sizes import Probe
from bytesched.tunable import Decision, Setting
from bytesched.tuning.search import Search
from bytesched.tuning.space import Given, Link, Space, fit_probes, seed_bytes, seeded_space

KIB = 1024
MIB = 1 << 20
SPACE = Space(64 * KIB, 4096 * KIB)


def valley_s(setting: Setting) -> float:
    """Least at 512 KiB and a window of 2."""
    partition = math.log2(setting.partition_bytes / (512 * KIB))
    window = math.log2(setting.credit_bytes / setting.partition_bytes / 2)
    return 0.4 * (1 + 0.06 * partition**2 + 0.04 * window**2)


def proposals(search: Search, count: int) -> list[Setting]:
    asked: list[Setting] = []
    while len(asked) < count and (setting := search.ask()) is not None:
        asked.append(setting)
        search.tell(setting, valley_s(setting))
    return asked


def test_proposals_are_of_the_space_and_new_and_find_a_valley() -> None:
    tried = proposals(Search(SPACE), 10)
    assert set(tried) <= set(SPACE.settings)
    assert len(set(tried)) == len(tried)
    assert min(map(valley_s, tried)) <= 1.1 * min(map(valley_s, SPACE.settings))


def test_a_proposal_stands_until_something_is_told() -> None:
    search = Search(SPACE)
    assert search.ask() == search.ask()


def test_what_is_to_come_first_comes_first_and_anything_may_be_told() -> None:
    first = [SPACE.settings[-1], SPACE.settings[5]]
    assert proposals(Search(SPACE, first=[*first, Setting(48, 96)]), 2) == first
    search = Search(SPACE)
    search.tell(SPACE.settings[7], 0.5)
    search.tell(Setting(48, 96), 0.7)
    assert SPACE.settings[7] not in proposals(search, 5)


def test_costs_that_are_none_are_refused() -> None:
    for cost_s in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="a step does not take"):
            Search(SPACE).tell(SPACE.settings[0], cost_s)


@pytest.mark.parametrize("credit_bytes", [256 * KIB, 0])
def test_it_ends(credit_bytes: int) -> None:
    space = Space(128 * KIB, 128 * KIB, Given(credit_bytes=credit_bytes))
    search = Search(space)
    assert len(proposals(search, len(space) + 1)) <= len(space)
    assert search.ask() is None


@given(
    low=st.integers(16, 1 << 26),
    ratio=st.floats(1, 512),
    credit=st.just(0) | st.integers(16, 1 << 32),
)
def test_every_setting_of_a_space_can_be_used(low: int, ratio: float, credit: int) -> None:
    space = Space(low, int(low * ratio), Given(credit_bytes=credit))
    assert space.settings
    for setting in space.settings:
        assert setting.credit_bytes >= setting.partition_bytes
        assert setting in space
        assert all(0 <= value <= 1 for value in space.coordinates(setting))
    assert len(set(space.settings)) == len(space)


def test_what_is_given_is_kept() -> None:
    given = Given.of(Config(credit_bytes=3 * MIB, policy="fifo"))
    settings = Space(64 * KIB, 16 * MIB, given).settings
    assert {(setting.credit_bytes, setting.policy) for setting in settings} == {(3 * MIB, "fifo")}
    assert max(setting.partition_bytes for setting in settings) == 3 * MIB
    settings = Space(64 * KIB, 16 * MIB, Given.of(Config(partition_bytes=MIB))).settings
    assert {setting.partition_bytes for setting in settings} == {MIB}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"partition_bytes": MIB, "credit_bytes": MIB}, "nothing to tune"),
        ({"policy": "hurry"}, "no policy 'hurry'"),
    ],
)
def test_bad_input_is_refused(fields: dict[str, object], said: str) -> None:
    config = Config(**fields)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=said):
        Given.of(config)


@pytest.mark.parametrize("steps", [0, -1, 39, "many", "1e9", 1.5, True, 10**9, None])
def test_steps_are_refused(steps: object) -> None:
    with pytest.raises(ConfigError, match="tune_steps"):
        Config(tune_steps=steps)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("partition_bytes", "credit_bytes"),
    [(0, 0), (-1, MIB), (MIB, MIB - 1), ("much", "more"), (1, 1), (1 << 41, 1 << 41)],
)
def test_a_setting_can_be_used(partition_bytes: object, credit_bytes: object) -> None:
    with pytest.raises(ConfigError):
        Setting(partition_bytes, credit_bytes)  # type: ignore[arg-type]


def test_a_word_survives_the_wire() -> None:
    for setting in (Setting(96 * KIB, 3 * MIB, "fifo"), Setting(MIB, MIB, enabled=False)):
        word = Decision(setting, 7)
        assert Decision.of(word.numbers()) == word


@given(overhead_s=st.floats(1e-5, 1e-2), bytes_per_s=st.floats(1e6, 1e10), seed=st.integers(0, 100))
def test_a_line_is_found_among_wild_values(
    overhead_s: float, bytes_per_s: float, seed: int
) -> None:
    link = Link(overhead_s, bytes_per_s)
    sizes = [int(overhead_s * bytes_per_s * ratio) + 16 for ratio in (0.5, 1, 2, 4, 8, 16, 32)]
    seconds = [link.seconds(size) for size in sizes]
    wild = random.Random(seed)
    seconds[wild.randrange(len(sizes))] *= wild.uniform(2, 50)
    found = fit_probes(
        [Probe(size, size / each) for size, each in zip(sizes, seconds, strict=True)]
    )
    assert found.bytes_per_s == pytest.approx(bytes_per_s, rel=0.3)
    assert found.seconds(sizes[3]) == pytest.approx(link.seconds(sizes[3]), rel=0.3)


def test_without_slope_all_time_is_the_bandwidths() -> None:
    assert fit_probes([Probe(MIB, MIB / 0.01)]) == Link(0.0, MIB / 0.01)
    noise = fit_probes([Probe(MIB, MIB / 0.02), Probe(2 * MIB, 2 * MIB / 0.01)])
    assert noise.overhead_s == 0.0
    assert fit_probes([Probe(MIB, 1e8, cpu_s=1e-4)]).overhead_s == pytest.approx(2e-4)


def test_the_seed_is_the_bounds_and_the_box_surrounds_it() -> None:
    cluster = Cluster()
    facts = cluster.facts()
    link = Link(1e-3, 1e8)
    seed = seed_bytes(facts, link)
    assert seed == pytest.approx((1e-3 * 1e8 * facts.model_bytes / 3) ** 0.5, rel=1e-3)
    space = seeded_space(Given(), facts, link)
    low, high = space.low_bytes, space.high_bytes
    assert low < facts.untuned.partition_bytes
    assert high > max(seed, facts.untuned.partition_bytes)
    assert high <= 2 * facts.model_bytes
    narrow = seeded_space(Given(MIB), facts, link)
    assert (narrow.low_bytes, narrow.high_bytes) == (MIB, MIB)
    tiny = cluster.facts(model_bytes=10_000, untuned=Setting(128 * KIB, 256 * KIB))
    assert seeded_space(Given(), tiny, link).settings
