"""What a layer, or a block of branches, costs in every way that it can be placed.

A cost has several sides, and what is worse in one may be better in another: each way that no other
one beats in every respect is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise, product
from operator import add
from typing import NamedTuple

from bytesched.burst.cost import Place, PlacedBranches, Plan, Task
from bytesched.burst.graph import Branches, Chain, Item, Layer


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
    larger = dict(pairwise(widths))

    def could_grow(capacity: tuple[int, ...]) -> bool:
        free = devices - sum(capacity)
        return any(width in larger and larger[width] - width <= free for width in capacity)

    return tuple(
        capacity
        for capacity in product(widths, repeat=lanes)
        if sum(capacity) <= devices and not could_grow(capacity)
    )


class Cost(NamedTuple):
    """What one item, or a chain of them, adds to an iteration."""

    forward_ns: int
    backward_ns: int
    #: of the busiest link
    link_ns: int
    device_ns: int
    plan: Plan = ()
    #: the plans of a block's branches, until they are put together
    branches: tuple[Plan, ...] = ()


FREE = Cost(0, 0, 0, 0)


class ItemCosts:
    """The costs of the items of one task."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._cluster = task.cluster
        self._batch = task.graph.batch
        self._widths = task.graph.widths(task.cluster.devices)
        #: costs of branches; a chain is looked up by its identity, as hashing one takes long
        self._known: dict[tuple[int, Place, int, Place, Place], list[Cost]] = {}

    def item(
        self, item: Item, before: Place | None, sample_bytes: int, lane: Place
    ) -> dict[Place, list[Cost]]:
        """What an item costs from the place before it to each of its own, within a lane."""
        if isinstance(item, Layer):
            return self._layer(item, before, sample_bytes, lane)
        assert before is not None
        return self._block(item, before, sample_bytes, lane)

    def _layer(
        self, layer: Layer, before: Place | None, sample_bytes: int, lane: Place
    ) -> dict[Place, list[Cost]]:
        found = {}
        for width in self._widths:
            if width > lane.width or not self._task.admits(layer, width):
                continue
            place = Place(lane.first, width)
            move = self._moved(sample_bytes, before, place)
            samples = self._batch // width
            forward_ns, backward_ns = layer.forward.ns(samples), layer.backward.ns(samples)
            found[place] = [
                Cost(
                    move.forward_ns + forward_ns,
                    move.backward_ns + backward_ns,
                    move.link_ns + self._cluster.gradients_ns(layer, width),
                    move.device_ns + width * (forward_ns + backward_ns),
                    (place,),
                )
            ]
        return found

    def _moved(self, sample_bytes: int, source: Place | None, target: Place) -> Cost:
        if source is None:
            return FREE
        ns = self._cluster.move_ns(self._batch, sample_bytes, source, target)
        return Cost(ns, ns, ns, 2 * ns * max(source.width, target.width))

    def _block(
        self, block: Branches, before: Place, sample_bytes: int, lane: Place
    ) -> dict[Place, list[Cost]]:
        widths = tuple(width for width in self._widths if width <= lane.width)
        found: dict[Place, list[Cost]] = {}
        for width in widths:
            join = Place(lane.first, width)
            costs: list[Cost] = []
            for lanes in lanes_of(len(block.branches), widths, lane.width):
                for capacity in capacities(max(lanes) + 1, widths, lane.width):
                    costs += self._arranged(block, before, sample_bytes, join, lanes, capacity)
            found[join] = undominated(costs)
        return found

    def _arranged(
        self,
        block: Branches,
        before: Place,
        sample_bytes: int,
        join: Place,
        lanes: tuple[int, ...],
        capacity: tuple[int, ...],
    ) -> list[Cost]:
        """The costs of a block with these lanes, the plans of its branches in their order."""
        in_lane: list[list[Cost]] = []
        order: list[int] = []
        first = join.first
        for number, width in enumerate(capacity):
            members = [index for index, lane in enumerate(lanes) if lane == number]
            order += members
            costs = [FREE]
            for index in members:
                options = self._branch(
                    block.branches[index], before, sample_bytes, Place(first, width), join
                )
                costs = undominated(_after(a, b) for a in costs for b in options)
            in_lane.append(costs)
            first += width
        beside = in_lane[0]
        for costs in in_lane[1:]:
            beside = undominated(_beside(a, b) for a in beside for b in costs)
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
    ) -> list[Cost]:
        """The costs of a branch, from the split to the join."""
        key = (id(branch), before, sample_bytes, lane, join)
        if key in self._known:
            return self._known[key]
        ends: dict[Place, list[Cost]] = {before: [FREE]}
        for item in branch:
            grown: dict[Place, list[Cost]] = {}
            for here, begun in ends.items():
                for place, costs in self.item(item, here, sample_bytes, lane).items():
                    grown.setdefault(place, []).extend(_after(a, b) for a in begun for b in costs)
            ends = {place: undominated(costs) for place, costs in grown.items()}
            sample_bytes = item.output_bytes
        found = self._known[key] = undominated(
            _after(cost, self._moved(sample_bytes, place, join))._replace(
                plan=(), branches=(cost.plan,)
            )
            for place, costs in ends.items()
            for cost in costs
        )
        return found


def _after(first: Cost, second: Cost) -> Cost:
    return Cost._make(map(add, first, second))


def _beside(one: Cost, other: Cost) -> Cost:
    return Cost(
        max(one.forward_ns, other.forward_ns),
        max(one.backward_ns, other.backward_ns),
        max(one.link_ns, other.link_ns),
        one.device_ns + other.device_ns,
        one.plan + other.plan,
        one.branches + other.branches,
    )


def undominated(costs: Iterable[Cost]) -> list[Cost]:
    """Those that no other one beats in every respect."""
    kept: list[Cost] = []
    for cost in sorted(costs, key=lambda cost: cost[:4]):
        _, backward_ns, link_ns, device_ns = cost[:4]
        if not any(
            k.backward_ns <= backward_ns and k.link_ns <= link_ns and k.device_ns <= device_ns
            for k in kept
        ):
            kept.append(cost)
    return kept
