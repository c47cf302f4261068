"""The fastest plan within its budget: dynamic programming over layers and branch-join blocks.

Exact for the model of `bytesched.burst.cost`, in whole nanoseconds. Two limits make it more than a
shortest path: the device-seconds of the whole iteration are bounded, and gradients that are still
on the link when their layer has been passed may or may not become visible later. So partial plans
with the same last devices are not ranked by one number: all are kept that no other one beats in
every respect (labels, as in the shortest path with resource constraints; Desrochers 1988). What
cannot be completed within the budget, or not faster than a plan that is known, is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bytesched.burst.cost import Place, PlacedBranches, Plan, Schedule, Task, schedule
from bytesched.burst.items import Cost, ItemCosts
from bytesched.errors import ConfigError

#: labels per place in the first pass, which only looks for a good plan to compare with
_BEAM = 8


class Found(NamedTuple):
    """A plan and its timeline."""

    plan: Plan
    schedule: Schedule


class _Label(NamedTuple):
    """A plan for the first items of the model."""

    #: an iteration of these items alone
    time_ns: int
    #: by how much forward and all gradients so far, on one link, exceed that time
    slack_ns: int
    device_ns: int
    before: _Label | None
    placed: Plan


class _Bounds(NamedTuple):
    """What the items that are still to come add, at least and at most."""

    least_time_ns: int
    least_device_ns: int
    most_link_ns: int


#: of an item, what it costs from each place before it to each of its own
_Options = dict[tuple[Place | None, Place], list[Cost]]


def fastest_plan(task: Task) -> Found:
    """The plan with the shortest iteration; among equals, one with the fewest device-seconds.

    Raises `ConfigError` if the task is impossible.
    """
    if task.amplification < 1:
        raise ConfigError(
            f"amplification {task.amplification:g}: one device already takes 1, so 1 is the least"
        )
    if task.cluster.devices < 1:
        raise ConfigError(f"{task.cluster.devices} devices: at least 1")
    whole = Place(0, task.cluster.devices)
    items = ItemCosts(task)
    steps: list[_Options] = []
    places: list[Place | None] = [None]
    sample_bytes = 0
    for item in task.graph.chain:
        options: _Options = {}
        for before in places:
            for place, costs in items.item(item, before, sample_bytes, whole).items():
                options[before, place] = costs
        steps.append(options)
        places = list(dict.fromkeys(place for _, place in options))
        sample_bytes = item.output_bytes
    bounds = _bounds(steps)
    first = _pass(steps, bounds, task.budget_ns, beam=_BEAM)
    assert first is not None, "one device is always within the budget"
    best = _pass(steps, bounds, task.budget_ns, limit_ns=first.time_ns) or first
    placed: list[Place | PlacedBranches] = []
    label: _Label | None = best
    while label is not None:
        placed[:0] = label.placed
        label = label.before
    timeline = schedule(task, tuple(placed))
    assert (timeline.time_ns, timeline.device_ns) == (best.time_ns, best.device_ns), (
        f"the search computed {best.time_ns} ns and {best.device_ns} device-ns, the timeline "
        f"of its plan has {timeline.time_ns} and {timeline.device_ns}"
    )
    return Found(tuple(placed), timeline)


def _pass(
    steps: Sequence[_Options],
    bounds: Sequence[_Bounds],
    budget_ns: int,
    *,
    beam: int | None = None,
    limit_ns: int | None = None,
) -> _Label | None:
    """The best label of the whole model; with a beam, a good one."""
    labels: dict[Place | None, list[_Label]] = {None: [_Label(0, 0, 0, None, ())]}
    for options, rest in zip(steps, bounds, strict=True):
        grown: dict[Place | None, list[_Label]] = {}
        for (before, place), costs in options.items():
            grown.setdefault(place, []).extend(
                label
                for begun in labels.get(before, ())
                for cost in costs
                if (label := _extended(begun, cost, rest, budget_ns, limit_ns)) is not None
            )
        labels = {place: _undominated(found) for place, found in grown.items()}
        if beam is not None:
            # The fastest ones, and the cheapest, so that the budget can always be kept.
            labels = {
                place: [*found[:beam], *sorted(found, key=lambda x: x.device_ns)[:beam]]
                for place, found in labels.items()
            }
    ends = [label for found in labels.values() for label in found]
    return min(ends, key=lambda label: (label.time_ns, label.device_ns), default=None)


def _extended(
    label: _Label, cost: Cost, rest: _Bounds, budget_ns: int, limit_ns: int | None
) -> _Label | None:
    """The label with one more item; None if nothing better can come of it."""
    exposed_ns = label.slack_ns + cost.link_ns
    compute_ns = cost.forward_ns + cost.backward_ns
    time_ns = label.time_ns + compute_ns + max(0, exposed_ns)
    if limit_ns is not None and time_ns + rest.least_time_ns > limit_ns:
        return None
    device_ns = label.device_ns + cost.device_ns
    if device_ns + rest.least_device_ns > budget_ns:
        return None
    # T' = f + b + max(T, U + link), U' = U + f + link, slack = U - T
    slack_ns = exposed_ns - cost.backward_ns - max(0, exposed_ns)
    # Below this, gradients remain hidden whatever comes.
    slack_ns = max(slack_ns, -rest.most_link_ns)
    return _Label(time_ns, slack_ns, device_ns, label, cost.plan)


def _undominated(labels: Iterable[_Label]) -> list[_Label]:
    """Those that no other one beats in every respect, the fastest first."""
    kept: list[_Label] = []
    for label in sorted(labels, key=lambda label: label[:3]):
        _, slack_ns, device_ns, _, _ = label
        if not any(k.slack_ns <= slack_ns and k.device_ns <= device_ns for k in kept):
            kept.append(label)
    return kept


def _bounds(steps: Sequence[_Options]) -> list[_Bounds]:
    """For each item, the bounds of all that come after it."""
    found = [_Bounds(0, 0, 0)]
    for options in reversed(steps[1:]):
        costs = [cost for options_to in options.values() for cost in options_to]
        rest = found[-1]
        found.append(
            _Bounds(
                rest.least_time_ns + min(c.forward_ns + c.backward_ns for c in costs),
                rest.least_device_ns + min(c.device_ns for c in costs),
                rest.most_link_ns + max(c.link_ns for c in costs),
            )
        )
    return found[::-1]
