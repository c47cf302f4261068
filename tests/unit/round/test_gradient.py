"""The tables of gradients and updates: what they say of each state, and what they refuse."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest
from paths import ROOT

from bytesched.errors import InvalidTransition
from bytesched.round import (
    AFTER,
    BUNDLE_AFTER,
    Bundle,
    BundleEvent,
    BundleState,
    Gradient,
    GradientEvent,
    GradientState,
    Job,
)


@pytest.mark.parametrize(("state", "event"), product(GradientState, GradientEvent))
def test_what_is_not_in_the_table_is_refused(state: GradientState, event: GradientEvent) -> None:
    gradient = Gradient("p")
    gradient.state = state
    if (state, event) in AFTER:
        gradient.on(event)
        assert gradient.state is AFTER[state, event]
    else:
        with pytest.raises(InvalidTransition, match=f"'{event.value}' on .* p {state.value}"):
            gradient.on(event)
        assert gradient.state is state


@pytest.mark.parametrize(("state", "event"), product(BundleState, BundleEvent))
def test_bundles_likewise(state: BundleState, event: BundleEvent) -> None:
    bundle: Bundle[Gradient, Job] = Bundle(3, [Gradient("p")], set(), 1)
    bundle.state = state
    if (state, event) in BUNDLE_AFTER:
        bundle.on(event)
        assert bundle.state is BUNDLE_AFTER[state, event]
    else:
        with pytest.raises(
            InvalidTransition, match=f"'{event.value}' on <Bundle 3 of p {state.value}"
        ):
            bundle.on(event)


def test_every_state_is_reached_and_left() -> None:
    reached = {GradientState.FREE}
    while more := {after for (state, _), after in AFTER.items() if state in reached} - reached:
        reached |= more
    assert reached == set(GradientState)


def test_nothing_is_applied_that_is_not_summed() -> None:
    before = {state for (state, _), after in AFTER.items() if after is GradientState.APPLIED}
    assert before - {GradientState.APPLIED} == {GradientState.DUE}
    entered = {
        (state, event) for (state, event), after in AFTER.items() if after is GradientState.DUE
    }
    assert (GradientState.ARMED, GradientEvent.SUM) in entered
    assert (GradientState.TRAVELLING, GradientEvent.ARM) not in entered


PAGE = ROOT / "docs/explanation/gates.md"


@pytest.mark.parametrize("table", [AFTER, BUNDLE_AFTER], ids=["gradient", "update"])
def test_the_page_has_the_tables(table: Mapping[tuple[Any, Any], Any]) -> None:
    page = PAGE.read_text()
    for state in dict.fromkeys(state for state, _ in table):
        after = {
            event.value: to
            for (at, event), to in table.items()
            if at is state and not event.value.startswith("fork")
        }
        leaves = [f"{event} → {to.value}" for event, to in after.items() if to is not state]
        stays = [event for event, to in after.items() if to is state]
        assert f"| {', '.join(leaves) or '-'} | {', '.join(stays) or '-'} |" in page
        assert f"| {state.value} |" in page
