"""Searchers and their space: the contract, and what is refused before anything is tried."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytesched.config import Config
from bytesched.errors import ConfigError
from bytesched.tunable import Decision, Setting
from bytesched.tuning.contract import SearcherContract
from bytesched.tuning.search import BayesianSearch, RandomSearch, Searcher
from bytesched.tuning.space import Limits, Range, Space

KIB = 1024
MIB = 1 << 20


class TestBayesian(SearcherContract):
    def searcher(self, space: Space, seed: int, first: Sequence[Setting]) -> Searcher:
        return BayesianSearch(space, seed=seed, first=first)


class TestRandom(SearcherContract):
    patience = 60

    def searcher(self, space: Space, seed: int, first: Sequence[Setting]) -> Searcher:
        return RandomSearch(space, seed=seed, first=first)


class _Forgetful(RandomSearch):
    """Proposes what it was told already."""

    def _untold(self) -> list[Setting]:
        return list(self.space.settings)

    def _propose(self, untold: list[Setting]) -> Setting | None:
        return untold[0]


class _Moody(RandomSearch):
    """Does not keep to its seed."""

    def _propose(self, untold: list[Setting]) -> Setting | None:
        return random.SystemRandom().choice(untold) if untold else None


@pytest.mark.parametrize("broken", [_Forgetful, _Moody])
def test_the_contract_notices(broken: type[RandomSearch]) -> None:
    class Suite(SearcherContract):
        def searcher(self, space: Space, seed: int, first: Sequence[Setting]) -> Searcher:
            return broken(space, seed=seed, first=first)

    with pytest.raises(AssertionError):
        Suite().run_all()


@pytest.mark.nightly
def test_bayesian_search_is_better_than_random_at_the_same_number_of_trials() -> None:
    space = Space(Limits(Range(64 * KIB, 32 * MIB)))

    def cost_s(setting: Setting) -> float:
        sent = 40e6 / setting.partition_bytes * 1e-3
        return 0.3 + sent + 2 * setting.credit_bytes / 1e8

    def found_s(searcher: Searcher) -> float:
        for _ in range(12):
            setting = searcher.ask()
            if setting is None:
                break
            searcher.tell(setting, cost_s(setting))
        best = searcher.best()
        assert best is not None
        return best[1]

    best_s = min(map(cost_s, space.settings))
    bayesian = [found_s(BayesianSearch(space, seed=seed)) / best_s for seed in range(5)]
    blind = [found_s(RandomSearch(space, seed=seed)) / best_s for seed in range(5)]
    assert sorted(bayesian)[2] < 1.01
    assert sorted(bayesian)[2] < sorted(blind)[2]


@given(
    low=st.integers(16, 1 << 30),
    ratio=st.floats(1, 512),
    credit=st.tuples(st.integers(0, 1 << 32), st.integers(0, 1 << 32)),
)
def test_every_setting_of_a_space_can_be_used(
    low: int, ratio: float, credit: tuple[int, int]
) -> None:
    partition = Range(low, int(low * ratio))
    try:
        space = Space(Limits(partition, Range(*credit)))
    except ConfigError:
        return
    for setting in space.settings:
        assert setting.credit_bytes >= setting.partition_bytes
        assert setting in space
        assert all(0 <= value <= 1 for value in space.coordinates(setting))
    assert len(set(space.settings)) == len(space)


def test_a_given_size_is_kept() -> None:
    limits = Limits.of(Config(credit_bytes=3 * MIB)).closed(Range(64 * KIB, 16 * MIB))
    settings = Space(limits).settings
    assert {setting.credit_bytes for setting in settings} == {3 * MIB}
    assert max(setting.partition_bytes for setting in settings) == 3 * MIB
    limits = Limits.of(Config(partition_bytes=MIB)).closed(Range(64 * KIB, 16 * MIB))
    assert {setting.partition_bytes for setting in Space(limits).settings} == {MIB}


def test_names_are_a_choice_where_both_sizes_are_given() -> None:
    config = Config(partition_bytes=MIB, credit_bytes=MIB, tune_space="policy=priority|fifo")
    assert [setting.policy for setting in Space(Limits.of(config)).settings] == ["priority", "fifo"]


def test_tune_space_narrows() -> None:
    config = Config(
        tune_space="partition_bytes = 64KiB..1MiB, credit_bytes=..4MiB policy=fifo|priority"
    )
    space = Space(Limits.of(config).closed(Range(1, 1 << 40)))
    sizes = [setting.partition_bytes for setting in space.settings]
    assert (min(sizes), max(sizes)) == (64 * KIB, MIB)
    assert max(setting.credit_bytes for setting in space.settings) <= 4 * MIB
    assert {setting.policy for setting in space.settings} == {"fifo", "priority"}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"partition_bytes": MIB, "credit_bytes": MIB}, "nothing to tune"),
        ({"tune_space": "partition_bytes=1MiB credit_bytes=4MiB"}, "nothing to tune"),
        ({"tune_space": "partition_bytes=1MiB credit_bytes=1MiB..1.5MiB"}, "nothing to tune"),
        ({"tune_space": "partition_bytes=1MiB..2MiB", "credit_bytes": MIB}, "nothing to tune"),
        ({"tune_space": "partition_bytes=0..1MiB"}, "not 0"),
        ({"tune_space": "partition_bytes=-1..1MiB"}, "negative"),
        ({"tune_space": "partition_bytes=64KiB..9999TiB"}, "unit"),
        ({"tune_space": "partition_bytes=64KiB..99999GiB"}, "1 TiB"),
        ({"tune_space": "partition_bytes=small..large"}, "not a size"),
        ({"tune_space": "partition_bytes=nan"}, "not a size"),
        ({"tune_space": "partition_bytes=4MiB..1MiB"}, "no size is at least"),
        ({"tune_space": "partition_bytes=.."}, "both ends"),
        ({"tune_space": "partition_bytes=4MiB.. credit_bytes=..1MiB"}, "is below partition_bytes"),
        ({"tune_space": "partition=1MiB..4MiB"}, "did you mean partition_bytes"),
        ({"tune_space": "partition_bytes"}, "name=value"),
        ({"tune_space": "credit_bytes=..1MiB credit_bytes=..2MiB"}, "twice"),
        ({"tune_space": "policy=hurry|priority"}, "no policy 'hurry'"),
        ({"tune_space": "order=mine"}, "there is no .order."),
        ({"tune_space": "partition_bytes=..4MiB", "partition_bytes": MIB}, "leave out one"),
    ],
)
def test_bad_input_is_refused(fields: dict[str, object], said: str) -> None:
    config = Config(**fields)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=said):
        Limits.of(config)


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
    for setting in (
        Setting(96 * KIB, 3 * MIB, "fifo"),
        Setting(MIB, MIB, enabled=False),
    ):
        word = Decision(setting, 7)
        assert Decision.of(word.numbers()) == word
