"""The fastest plan within its budget: dynamic programming over layers and branch-join blocks.

Exact for the model of `bytesched.burst.cost`, in whole nanoseconds. Two limits make it more than a
shortest path: the device-seconds of the whole iteration are bounded, and gradients that are still
on the link when their layer has been passed may or may not become visible later. So partial plans
with the same last devices are not ranked by one number: all are kept that no other one beats in
every respect (labels, as in the shortest path with resource constraints; Desrochers 1988). What
cannot be completed within the budget, or not faster than a plan that is known, is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from bytesched.burst.cost import Cluster, Place, PlacedBranches, Plan, Schedule, Task, schedule
from bytesched.burst.graph import Branches, Chain, Item, Layer
from bytesched.errors import ConfigError

__all__ = ["Found", "fastest_plan", "lanes_of"]

#: labels per place in the first pass, which only looks for a good plan to compare with
_BEAM = 8


class Found(NamedTuple):
    """A plan and its timeline."""

    plan: Plan
    schedule: Schedule


class _Cost(NamedTuple):
    """What one item, or a chain of them, adds to an iteration."""

    forward_ns: int
    backward_ns: int
    #: of the busiest link
    link_ns: int
    device_ns: int
    plan: Plan = ()
    #: the plans of a block's branches, until they are put together
    branches: tuple[Plan, ...] = ()


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


_FREE = _Cost(0, 0, 0, 0)
_Options = dict[tuple[Place | None, Place], list[_Cost]]


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
    return _Search(task).run()


def lanes_of(branches: int, widths: Sequence[int], devices: int) -> Iterator[tuple[int, ...]]:
    """Every way to give branches to lanes: the lane of each; see `capacities`.

    Lane 0 may be any group of them, as it has the devices that the join is on; the others are
    numbered by their first branch. There are as many lanes as fit at least.
    """
    most = max(n for n in range(1, devices + 1) if n * min(widths) <= devices)
    for groups in _groupings(branches, most):
        count = max(groups) + 1
        for home in range(count):
            order = [home, *(group for group in range(count) if group != home)]
            yield tuple(order.index(group) for group in groups)


def _groupings(branches: int, most: int) -> Iterator[tuple[int, ...]]:
    """Partitions of branches into at most so many groups, numbered by their first member."""

    def grow(groups: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(groups) == branches:
            yield groups
            return
        for group in range(min(most, max(groups) + 2)):
            yield from grow((*groups, group))

    yield from grow((0,))


@lru_cache(maxsize=256)
def capacities(lanes: int, widths: tuple[int, ...], devices: int) -> tuple[tuple[int, ...], ...]:
    """Numbers of devices for each lane, none of which could be given more."""
    fitting = [c for c in product(widths, repeat=lanes) if sum(c) <= devices]
    return tuple(
        c
        for c in fitting
        if not any(
            other != c and all(a >= b for a, b in zip(other, c, strict=True)) for other in fitting
        )
    )


class _Search:
    """One search; see the module."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._cluster: Cluster = task.cluster
        self._batch = task.graph.batch
        self._budget_ns = task.budget_ns
        self._widths = task.graph.widths(task.cluster.devices)
        #: costs of branches; a chain is told by its identity, as hashing one takes long
        self._known: dict[tuple[int, Place, int, Place, Place], list[_Cost]] = {}

    def run(self) -> Found:
        chain = self._task.graph.chain
        whole = Place(0, self._task.cluster.devices)
        steps = self._steps(chain, whole)
        bounds = _bounds(steps)
        first = self._pass(steps, bounds, beam=_BEAM, limit_ns=None)
        assert first is not None, "one device is always within the budget"
        best = self._pass(steps, bounds, beam=None, limit_ns=first.time_ns) or first
        placed: list[Place | PlacedBranches] = []
        label: _Label | None = best
        while label is not None:
            placed[:0] = label.placed
            label = label.before
        plan = tuple(placed)
        timeline = schedule(self._task, plan)
        assert (timeline.time_ns, timeline.device_ns) == (best.time_ns, best.device_ns), (
            f"the search computed {best.time_ns} ns and {best.device_ns} device-ns, the timeline "
            f"of its plan has {timeline.time_ns} and {timeline.device_ns}"
        )
        return Found(plan, timeline)

    # -- the chain of the model --------------------------------------------------------

    def _steps(self, chain: Chain, lane: Place) -> list[_Options]:
        """For each item of a chain, what it costs from each place before it to each of its own."""
        steps: list[_Options] = []
        places: list[Place | None] = [None]
        sample_bytes = 0
        for item in chain:
            options: _Options = {}
            for before in places:
                for place, costs in self._item(item, before, sample_bytes, lane).items():
                    options[before, place] = costs
            steps.append(options)
            places = list(dict.fromkeys(place for _, place in options))
            sample_bytes = item.output_bytes
        return steps

    def _pass(
        self,
        steps: Sequence[_Options],
        bounds: Sequence[_Bounds],
        *,
        beam: int | None,
        limit_ns: int | None,
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
                    if (label := self._extended(begun, cost, rest, limit_ns)) is not None
                )
            labels = {place: _undominated_labels(found) for place, found in grown.items()}
            if beam is not None:
                # The fastest ones, and the cheapest, so that the budget can always be kept.
                labels = {
                    place: [*found[:beam], *sorted(found, key=lambda x: x.device_ns)[:beam]]
                    for place, found in labels.items()
                }
        ends = [label for found in labels.values() for label in found]
        return min(ends, key=lambda label: (label.time_ns, label.device_ns), default=None)

    def _extended(
        self, label: _Label, cost: _Cost, rest: _Bounds, limit_ns: int | None
    ) -> _Label | None:
        """The label with one more item; None if nothing better can come of it."""
        hidden_ns = label.slack_ns + cost.link_ns
        compute_ns = cost.forward_ns + cost.backward_ns
        time_ns = label.time_ns + compute_ns + max(0, hidden_ns)
        if limit_ns is not None and time_ns + rest.least_time_ns > limit_ns:
            return None
        device_ns = label.device_ns + cost.device_ns
        if device_ns + rest.least_device_ns > self._budget_ns:
            return None
        # T' = f + b + max(T, U + link), U' = U + f + link, slack = U - T
        slack_ns = hidden_ns - cost.backward_ns - max(0, hidden_ns)
        # Below this, gradients remain hidden whatever comes.
        slack_ns = max(slack_ns, -rest.most_link_ns)
        return _Label(time_ns, slack_ns, device_ns, label, cost.plan)

    # -- one item ----------------------------------------------------------------------

    def _item(
        self, item: Item, before: Place | None, sample_bytes: int, lane: Place
    ) -> dict[Place, list[_Cost]]:
        if isinstance(item, Layer):
            return self._layer(item, before, sample_bytes, lane)
        assert before is not None
        return self._block(item, before, sample_bytes, lane)

    def _layer(
        self, layer: Layer, before: Place | None, sample_bytes: int, lane: Place
    ) -> dict[Place, list[_Cost]]:
        found = {}
        for width in self._widths:
            if width > lane.width or not self._task.admits(layer, width):
                continue
            place = Place(lane.first, width)
            move = self._moved(sample_bytes, before, place)
            samples = self._batch // width
            forward_ns, backward_ns = layer.forward.ns(samples), layer.backward.ns(samples)
            found[place] = [
                _Cost(
                    move.forward_ns + forward_ns,
                    move.backward_ns + backward_ns,
                    move.link_ns + self._cluster.gradients_ns(layer, width),
                    move.device_ns + width * (forward_ns + backward_ns),
                    (place,),
                )
            ]
        return found

    def _moved(self, sample_bytes: int, source: Place | None, target: Place) -> _Cost:
        if source is None:
            return _FREE
        ns = self._cluster.move_ns(self._batch, sample_bytes, source, target)
        return _Cost(ns, ns, ns, 2 * ns * max(source.width, target.width))

    def _block(
        self, block: Branches, before: Place, sample_bytes: int, lane: Place
    ) -> dict[Place, list[_Cost]]:
        widths = tuple(width for width in self._widths if width <= lane.width)
        found: dict[Place, list[_Cost]] = {}
        for width in widths:
            join = Place(lane.first, width)
            costs: list[_Cost] = []
            for lanes in lanes_of(len(block.branches), widths, lane.width):
                for capacity in capacities(max(lanes) + 1, widths, lane.width):
                    costs += self._arranged(block, before, sample_bytes, join, lanes, capacity)
            found[join] = _undominated(costs)
        return found

    def _arranged(
        self,
        block: Branches,
        before: Place,
        sample_bytes: int,
        join: Place,
        lanes: tuple[int, ...],
        capacity: tuple[int, ...],
    ) -> list[_Cost]:
        """The costs of a block with these lanes, the plans of its branches in their order."""
        in_lane: list[list[_Cost]] = []
        order: list[int] = []
        first = join.first
        for number, width in enumerate(capacity):
            members = [index for index, lane in enumerate(lanes) if lane == number]
            order += members
            costs = [_FREE]
            for index in members:
                options = self._branch(
                    block.branches[index], before, sample_bytes, Place(first, width), join
                )
                costs = _undominated(_after(a, b) for a in costs for b in options)
            in_lane.append(costs)
            first += width
        beside = in_lane[0]
        for costs in in_lane[1:]:
            beside = _undominated(_beside(a, b) for a in beside for b in costs)
        back = sorted(range(len(order)), key=order.__getitem__)
        return [
            cost._replace(
                plan=(PlacedBranches(tuple(cost.branches[i] for i in back), lanes, join),),
                branches=(),
            )
            for cost in beside
        ]

    def _branch(
        self, branch: Chain, before: Place, sample_bytes: int, lane: Place, join: Place
    ) -> list[_Cost]:
        """The costs of a branch, from the split to the join."""
        key = (id(branch), before, sample_bytes, lane, join)
        if key in self._known:
            return self._known[key]
        ends: dict[Place, list[_Cost]] = {before: [_FREE]}
        for item in branch:
            grown: dict[Place, list[_Cost]] = {}
            for here, begun in ends.items():
                for place, costs in self._item(item, here, sample_bytes, lane).items():
                    grown.setdefault(place, []).extend(_after(a, b) for a in begun for b in costs)
            ends = {place: _undominated(costs) for place, costs in grown.items()}
            sample_bytes = item.output_bytes
        found = self._known[key] = _undominated(
            _after(cost, self._moved(sample_bytes, place, join))._replace(
                plan=(), branches=(cost.plan,)
            )
            for place, costs in ends.items()
            for cost in costs
        )
        return found


def _after(first: _Cost, second: _Cost) -> _Cost:
    return _Cost(
        first.forward_ns + second.forward_ns,
        first.backward_ns + second.backward_ns,
        first.link_ns + second.link_ns,
        first.device_ns + second.device_ns,
        first.plan + second.plan,
        first.branches + second.branches,
    )


def _beside(one: _Cost, other: _Cost) -> _Cost:
    return _Cost(
        max(one.forward_ns, other.forward_ns),
        max(one.backward_ns, other.backward_ns),
        max(one.link_ns, other.link_ns),
        one.device_ns + other.device_ns,
        one.plan + other.plan,
        one.branches + other.branches,
    )


def _undominated(costs: Iterable[_Cost]) -> list[_Cost]:
    """Those that no other one beats in every respect."""
    kept: list[_Cost] = []
    for cost in sorted(costs, key=lambda cost: cost[:4]):
        _, backward_ns, link_ns, device_ns = cost[:4]
        if not any(
            k.backward_ns <= backward_ns and k.link_ns <= link_ns and k.device_ns <= device_ns
            for k in kept
        ):
            kept.append(cost)
    return kept


def _undominated_labels(labels: Iterable[_Label]) -> list[_Label]:
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
