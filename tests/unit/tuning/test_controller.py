"""The controller on a simulated cluster with a manual clock: what it finds, spends and survives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from tuning_cluster import BlindSearch, Cluster, Link, exact_step_s

from bytesched.tunable import Setting
from bytesched.tuning.controller import (
    SAME_DROP,
    Adopted,
    Controller,
    Drifted,
    Pace,
    Report,
)
from bytesched.tuning.file import Trial
from bytesched.tuning.search import Search
from bytesched.tuning.space import Given, Space
from bytesched.tuning.times import spread, typical_s

MIB = 1 << 20
SPACE = Space(256 << 10, 8 * MIB)
UNTUNED = Setting(8 * MIB, 32 * MIB)


class Log:
    def __init__(self) -> None:
        self.reports: list[Report] = []

    @property
    def adopted(self) -> list[Adopted]:
        return [report for report in self.reports if isinstance(report, Adopted)]

    @property
    def drifted(self) -> list[Drifted]:
        return [report for report in self.reports if isinstance(report, Drifted)]

    @property
    def tried(self) -> list[Trial]:
        return [report for report in self.reports if isinstance(report, Trial)]


def controller_on(
    cluster: Cluster,
    *,
    untuned: Setting = UNTUNED,
    pace: Pace | None = None,
    off: bool = True,
    known: Setting | None = None,
    known_step_s: float = math.nan,
    space: Space = SPACE,
    blind: bool = False,
) -> tuple[Controller, Log]:
    log = Log()

    def search(adopted: Setting | None) -> Search:
        first = [adopted] if adopted else []
        return BlindSearch(space, first=first) if blind else Search(space, first=first)

    controller = Controller(
        untuned,
        can_switch_off=off,
        search=search,
        now_s=lambda: cluster.now_s,
        pace=pace,
        report=log.reports.append,
        known=known,
        known_step_s=known_step_s,
    )
    return controller, log


def driven(cluster: Cluster, steps: int, **options: Any) -> Log:
    controller, log = controller_on(cluster, **options)
    cluster.drive(controller, steps)
    return log


def best_s(cluster: Cluster, more: Sequence[Setting] = ()) -> float:
    settings = (*SPACE.settings, *more)
    return min(exact_step_s(cluster.model, cluster.link, setting) for setting in settings)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "trouble",
    [
        {"stragglers": 0.08},
        {"evaluated_every": 10},
        {"evaluated_every": 10, "late": 0.3, "noise": 0.01},
        {"evaluated_every": 7, "stragglers": 0.05, "noise": 0.02},
    ],
    ids=["stragglers", "evaluation", "short_batches", "all"],
)
@pytest.mark.one_in(8)
def test_outliers_do_not_mislead_it(seed: int, trouble: dict[str, float]) -> None:
    cluster = Cluster("vgg", seed=seed, **trouble)  # type: ignore[arg-type]
    log = driven(cluster, 700)
    (adopted,) = log.adopted
    assert not log.drifted
    assert exact_step_s("vgg", cluster.link, adopted.setting) <= 1.05 * best_s(cluster)
    assert set(cluster.history[150:]) == {adopted.setting}


def test_most_of_a_few_steps_may_be_outliers() -> None:
    assert typical_s([1.6, 0.39, 1.53, 1.56, 0.4]) == pytest.approx(0.395)
    assert typical_s([0.41, 0.4, 0.42]) == 0.41
    assert typical_s([0.4, 0.13, 0.41]) == pytest.approx(0.405)
    assert typical_s([0.4, 0.41, 0.4, 0.13, 0.42]) == pytest.approx(0.405)
    assert spread([1.6, 0.4, 1.5, 0.4]) == 0
    assert math.isnan(typical_s([math.nan, 0.0, math.inf]))


def test_the_worst_candidates_cost_the_fewest_steps() -> None:
    cluster = Cluster()
    log = driven(cluster, 150, blind=True)
    cut = [tried for tried in log.tried if tried.cut]
    whole = [tried for tried in log.tried if tried.phase == "search" and not tried.cut]
    assert cut
    assert whole
    assert max(len(tried.durations_ms) for tried in cut) < min(len(t.durations_ms) for t in whole)


@pytest.mark.parametrize("late_step", [60, 400])
@pytest.mark.one_in(2)
def test_a_change_of_bandwidth_is_answered_once(late_step: int) -> None:
    """In the middle of the search as well as long after it."""

    def event(cluster: Cluster, step: int) -> None:
        if step == late_step:
            cluster.link = Link(4e-4, 40e6, 8e-4)

    cluster = Cluster(noise=0.02, event=event)
    log = driven(cluster, 2000)
    assert len([drift for drift in log.drifted if drift.retunes]) <= 1
    assert len(log.adopted) <= 2
    last = log.adopted[-1].setting
    assert exact_step_s("gpt", cluster.link, last) <= 1.04 * best_s(cluster)
    assert len(set(cluster.history[-1000:])) == 1, "it oscillates"
    if late_step == 400:
        assert len(log.adopted) == 2


def test_a_slow_phase_is_no_drift() -> None:
    """An hour of somebody else's traffic ends by itself."""

    def event(cluster: Cluster, step: int) -> None:
        cluster.link = Link(4e-4, 60e6 if 500 <= step < 535 else 118e6, 8e-4)

    cluster = Cluster(noise=0.02, event=event)
    log = driven(cluster, 1500, blind=True)
    assert log.adopted
    assert not log.drifted


def test_a_cluster_that_never_rests_is_tuned_at_most_so_often() -> None:
    def event(cluster: Cluster, step: int) -> None:
        cluster.link = Link(4e-4, 118e6 if step // 300 % 2 else 40e6, 8e-4)

    cluster = Cluster(event=event)
    pace = Pace(retune_every_s=2000.0)
    log = driven(cluster, 6000, pace=pace, blind=True)
    retunings = [drift for drift in log.drifted if drift.retunes]
    assert retunings
    assert len(retunings) <= 1 + cluster.now_s / pace.retune_every_s
    refused = [drift for drift in log.drifted if not drift.retunes]
    assert len(refused) <= 2 * len(log.adopted), "it says the same again and again"


@pytest.mark.parametrize("off_is_best", [False, True])
def test_what_is_adopted_is_never_worse_than_untuned_or_off(off_is_best: bool) -> None:
    """Also if the space holds nothing as good."""
    cluster = Cluster("resnet", noise=0.01)
    untuned, hopeless_bytes = Setting(MIB, 2 * MIB), 16 * MIB
    if off_is_best:
        cluster.link = Link(8e-3, 500e6)
        untuned, hopeless_bytes = Setting(64 << 10, 64 << 10), 64 << 10
    hopeless = Space(0, 0, Given(hopeless_bytes))
    log = driven(cluster, 160, untuned=untuned, space=hopeless)
    off = Setting(untuned.partition_bytes, untuned.credit_bytes, enabled=False)
    assert log.adopted[0].setting == (off if off_is_best else untuned)


@pytest.mark.parametrize(("first_drop", "drop"), [(6, 2), (2, 1)])
def test_steps_that_show_nothing_are_dropped(first_drop: int, drop: int) -> None:
    cluster = Cluster()
    pace = Pace(first_drop=first_drop, drop=drop)
    controller, _ = controller_on(cluster, pace=pace, blind=True)
    assert controller.turn.dropped == first_drop
    before = controller.turn.setting
    controller.observe(cluster.run(controller.turn))
    while controller.turn.phase != "guard":
        is_changed = controller.turn.setting != before
        assert controller.turn.dropped == (drop if is_changed else SAME_DROP)
        before = controller.turn.setting
        controller.observe(cluster.run(controller.turn))


def test_without_a_knob_scheduling_is_never_off() -> None:
    cluster = Cluster()
    driven(cluster, 300, off=False, blind=True)
    assert all(setting.enabled for setting in cluster.history)


@pytest.mark.parametrize(("factor", "times"), [(1.3, 0), (0.75, 0), (3.0, 1), (0.4, 1)])
def test_what_another_batch_size_was_tuned_for_is_not_kept(factor: float, times: int) -> None:
    """A run may be somewhat slower than the one that was tuned, but not another training."""
    known = Setting(MIB, 2 * MIB)
    cluster = Cluster(noise=0.02)
    step_s = factor * exact_step_s(cluster.model, cluster.link, known)
    log = driven(cluster, 1500, known=known, known_step_s=step_s, blind=True)
    assert [drift.retunes for drift in log.drifted] == [True] * times
    assert len(log.adopted) == times
    assert set(cluster.history[:100]) == {known}


@pytest.mark.parametrize(("first_drop", "drop"), [(2, 1), (6, 2), (6, 4)])
@pytest.mark.parametrize("off", [False, True])
def test_no_round_of_the_guard_goes_beyond_any_budget(
    off: bool, first_drop: int, drop: int
) -> None:
    for budget in (40, 41, 47, 60, 97, 150, 199):
        cluster = Cluster("resnet", noise=0.05, seed=budget)
        pace = Pace(budget=budget, first_drop=first_drop, drop=drop)
        log = driven(cluster, budget + 10, pace=pace, off=off, blind=True)
        assert log.adopted[0].steps <= budget
        others = off + any(tried.phase == "search" for tried in log.tried)
        assert not others or len(log.adopted[0].steps_s) > others, f"no guard within {budget}"
        assert others or budget < 50, f"nothing was tried within {budget}"


def test_steps_without_a_time_do_not_stop_it() -> None:
    cluster = Cluster()
    controller, log = controller_on(cluster, blind=True)
    for _ in range(60):
        controller.observe([math.nan] * controller.turn.steps)
    assert controller.turn.setting == UNTUNED
    assert len(log.adopted) == 1
