"""The suite that every searcher must pass, whoever wrote it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from bytesched.testing import Contract
from bytesched.tunable import Setting

from .search import Searcher
from .space import Limits, Range, Space

__all__ = ["SearcherContract"]

KIB = 1024


class SearcherContract(Contract):
    """What the `Searcher` protocol promises. Supply `searcher`."""

    #: how many proposals it may need to come within a tenth of the best cost of a smooth valley
    patience = 10

    def searcher(self, space: Space, seed: int, first: Sequence[Setting]) -> Searcher:
        """A new one."""
        raise NotImplementedError

    def space(self) -> Space:
        """A space with all axes."""
        sizes = Range(64 * KIB, 4096 * KIB)
        return Space(Limits(sizes, policies=("priority", "fifo")))

    def test_proposals_are_of_the_space_and_new(self) -> None:
        space = self.space()
        searcher = self.searcher(space, 0, ())
        seen = set()
        for setting in _proposals(searcher, _valley, 20):
            assert setting in space.settings, setting
            assert setting.credit_bytes >= setting.partition_bytes
            assert setting not in seen, f"{setting} was proposed twice"
            seen.add(setting)

    def test_a_proposal_stands_until_something_is_told(self) -> None:
        searcher = self.searcher(self.space(), 0, ())
        assert searcher.ask() == searcher.ask()

    def test_what_is_to_come_first_comes_first(self) -> None:
        space = self.space()
        first = [space.settings[-1], space.settings[5]]
        searcher = self.searcher(space, 0, first)
        assert _proposals(searcher, _valley, 2) == first

    def test_the_same_answers_bring_the_same_proposals(self) -> None:
        runs = [_proposals(self.searcher(self.space(), 3, ()), _valley, 12) for _ in range(2)]
        assert runs[0] == runs[1]

    def test_what_was_not_proposed_may_be_told(self) -> None:
        space = self.space()
        searcher = self.searcher(space, 0, ())
        searcher.tell(space.settings[7], 0.5)
        searcher.tell(Setting(48, 96), 0.7)
        assert space.settings[7] not in _proposals(searcher, _valley, 5)

    def test_costs_that_are_none_are_refused(self) -> None:
        space = self.space()
        searcher = self.searcher(space, 0, ())
        for cost_s in (0.0, -1.0, math.inf, math.nan):
            try:
                searcher.tell(space.settings[0], cost_s)
            except ValueError:
                continue
            raise AssertionError(f"it took {cost_s} s for a cost")
        assert searcher.best() is None

    def test_best_is_the_least_mean(self) -> None:
        space = self.space()
        searcher = self.searcher(space, 0, ())
        lucky, steady = space.settings[:2]
        for setting, cost_s in ((lucky, 0.1), (steady, 0.2), (lucky, 0.5)):
            searcher.tell(setting, cost_s)
        assert searcher.best() == (steady, 0.2)

    def test_it_ends(self) -> None:
        space = Space(Limits(Range(64 * KIB, 128 * KIB), Range(128 * KIB, 256 * KIB)))
        searcher = self.searcher(space, 0, ())
        asked = _proposals(searcher, _valley, len(space) + 1)
        assert len(asked) <= len(space)
        assert searcher.ask() is None

    def test_it_finds_a_valley(self) -> None:
        space = Space(Limits(Range(64 * KIB, 4096 * KIB)))
        searcher = self.searcher(space, 0, ())
        _proposals(searcher, _valley, self.patience)
        found = searcher.best()
        assert found is not None
        least_s = min(map(_valley, space.settings))
        assert found[1] <= 1.1 * least_s, f"{found[0]}: {found[1]} s, and {least_s} s is possible"


def _valley(setting: Setting) -> float:
    """Least at 512 KiB and a window of 2; a little more for what is not the default."""
    partition = math.log2(setting.partition_bytes / (512 * KIB))
    window = math.log2(setting.credit_bytes / setting.partition_bytes / 2)
    names = 0.01 * (setting.policy != "priority")
    return 0.4 * (1 + 0.06 * partition**2 + 0.04 * window**2 + names)


def _proposals(searcher: Searcher, cost_s: Callable[[Setting], float], count: int) -> list[Setting]:
    asked: list[Setting] = []
    while len(asked) < count and (setting := searcher.ask()) is not None:
        asked.append(setting)
        searcher.tell(setting, cost_s(setting))
    return asked
