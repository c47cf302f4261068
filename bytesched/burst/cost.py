"""What a plan costs: the model of time that the planner minimises, and a plan's timeline.

Of one iteration, on devices that are alike and each have one link:

- A layer on g devices computes its time for batch / g samples on each of them.
- Sample s of a batch on the devices o to o + g - 1 lies on device o + s mod g. Between unequal
  neighbours the samples that are elsewhere are moved, in forward and again in backward:
  latency + bytes / bandwidth, bytes being the most that one device sends or receives.
- Gradients of a layer on g devices take ``2 (g - 1) / g * bytes / bandwidth`` on the link. They
  leave when backward has passed the layer, one after the other, *beside* the backward pass of the
  layers in front: the iteration ends when both are over. (DeepPool's own planner adds them to
  the compute time.) Moves of backward use the link as well and are counted in it.
- Branches run one after the other on the devices of a lane, lanes beside each other; moves to
  different lanes are counted as if they did not share a link. Gradients of the branches leave when
  backward has passed all of them; those of different lanes travel on different links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from bytesched.burst.graph import Branches, Chain, Layer, ModelGraph


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices that are alike, and the link of each."""

    devices: int
    bytes_per_s: float
    #: of one move
    latency_s: float

    @property
    def latency_ns(self) -> int:
        return round(1e9 * self.latency_s)

    def link_ns(self, nbytes: int) -> int:
        """Nanoseconds that so many bytes take on a link."""
        return round(1e9 * nbytes / self.bytes_per_s)

    def gradients_ns(self, layer: Layer, width: int) -> int:
        """Nanoseconds on each link that all-reducing the gradients of a layer takes."""
        return self.link_ns(2 * (width - 1) * layer.parameter_bytes // width)

    def move_ns(self, batch: int, sample_bytes: int, source: Place, target: Place) -> int:
        """Nanoseconds to bring a batch from the devices that have it to those that need it."""
        samples = busiest_samples(batch, source, target)
        return self.latency_ns + self.link_ns(samples * sample_bytes) if samples else 0


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """The devices `first` to `first + width - 1`."""

    first: int
    width: int

    @property
    def devices(self) -> range:
        return range(self.first, self.first + self.width)

    @property
    def end(self) -> Place:
        """Where its output is."""
        return self


@dataclass(frozen=True, slots=True)
class PlacedBranches:
    """Branches on their devices; those in one lane run one after the other."""

    branches: tuple[Plan, ...]
    #: of each branch
    lanes: tuple[int, ...]
    #: where the join is
    join: Place

    @property
    def end(self) -> Place:
        """Where their joined output is."""
        return self.join


#: Where every item of a chain is.
Plan = tuple[Place | PlacedBranches, ...]


@lru_cache(maxsize=4096)
def busiest_samples(batch: int, source: Place, target: Place) -> int:
    """The most samples of a batch that one device sends or receives in a move."""
    sent: dict[int, int] = {}
    received: dict[int, int] = {}
    for sample in range(batch):
        here = source.first + sample % source.width
        there = target.first + sample % target.width
        if here != there:
            sent[here] = sent.get(here, 0) + 1
            received[there] = received.get(there, 0) + 1
    return max([0, *sent.values(), *received.values()])


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of a device's time."""

    device: int
    start_ns: int
    end_ns: int
    name: str
    #: "forward", "backward" or "move"
    kind: str


@dataclass(frozen=True, slots=True)
class Schedule:
    """What happens when in one iteration of a plan."""

    #: the length of the iteration
    time_ns: int
    #: the end of the last backward; gradients may still be on the link
    computed_ns: int
    #: device-nanoseconds of compute and moves
    device_ns: int
    spans: tuple[Span, ...]

    def busy_ns(self, device: int) -> int:
        """Nanoseconds for which a device computes or moves."""
        return sum(span.end_ns - span.start_ns for span in self.spans if span.device == device)


@dataclass(frozen=True, slots=True)
class Task:
    """Something to plan: a model, its devices, and how much its layers may cost on more of them."""

    graph: ModelGraph
    cluster: Cluster
    #: device-seconds over those of one device: limit for every layer and for the whole iteration
    amplification: float

    @property
    def budget_ns(self) -> int:
        """Device-nanoseconds that an iteration may take."""
        return int(self.amplification * self.graph.single_device_ns)

    def admits(self, layer: Layer, width: int) -> bool:
        """Whether a layer may use so many devices.

        A layer that is shorter than a move away and back, forward and backward, may always: to
        send its input elsewhere would cost more than it wastes. The budget counts it still.
        """
        alone_ns = layer.compute_ns(self.graph.batch)
        if width == 1 or alone_ns <= 4 * self.cluster.latency_ns:
            return True
        shared_ns = layer.compute_ns(self.graph.batch // width)
        return width * shared_ns <= self.amplification * alone_ns


def schedule(task: Task, plan: Plan) -> Schedule:
    """The timeline of a plan, event by event; what the search computes must agree with it."""
    return _Timeline(task).run(plan)


class _Timeline:
    """Walks over a plan, forward and then backward."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._batch = task.graph.batch
        self._spans: list[Span] = []
        self._device_ns = 0

    def run(self, plan: Plan) -> Schedule:
        steps = _steps(self._task.graph.chain, plan, None, 0)
        now_ns = 0
        for step in steps:
            now_ns, _ = self._item(*step, now_ns, backward=False)
        link_free_ns = now_ns
        for step in reversed(steps):
            now_ns, link_ns = self._item(*step, now_ns, backward=True)
            link_free_ns = max(link_free_ns, now_ns) + link_ns
        time_ns = max(now_ns, link_free_ns)
        return Schedule(time_ns, now_ns, self._device_ns, tuple(self._spans))

    def _item(
        self,
        item: Layer | Branches,
        placed: Place | PlacedBranches,
        source: Place | None,
        sample_bytes: int,
        now_ns: int,
        *,
        backward: bool,
    ) -> tuple[int, int]:
        """When an item that begins at `now_ns` is done; `source` has what it reads.

        And what its gradients, and its moves in one direction, take of the busiest link.
        """
        if isinstance(item, Layer):
            assert isinstance(placed, Place)
            curve, kind = (item.backward, "backward") if backward else (item.forward, "forward")
            took_ns = curve.ns(self._batch // placed.width)
            move_ns = 0
            if source is not None and not backward:
                move_ns = self._move(sample_bytes, source, placed, now_ns)
                now_ns += move_ns
            self._take(placed.devices, now_ns, now_ns + took_ns, item.name, kind)
            now_ns += took_ns
            if source is not None and backward:
                move_ns = self._move(sample_bytes, source, placed, now_ns)
                now_ns += move_ns
            return now_ns, move_ns + self._task.cluster.gradients_ns(item, placed.width)
        assert isinstance(placed, PlacedBranches)
        assert source is not None
        #: of each lane, when it is free, and what its link has to carry
        lanes: dict[int, tuple[int, int]] = {}
        branches = list(zip(item.branches, placed.branches, placed.lanes, strict=True))
        for branch, places, lane in reversed(branches) if backward else branches:
            at_ns, link_ns = lanes.get(lane, (now_ns, 0))
            steps = _steps(branch, places, source, sample_bytes)
            last = places[-1].end if places else source
            last_bytes = branch[-1].output_bytes if branch else sample_bytes
            if backward:
                move_ns = self._move(last_bytes, last, placed.join, at_ns)
                at_ns += move_ns
            for step in reversed(steps) if backward else steps:
                at_ns, its_ns = self._item(*step, at_ns, backward=backward)
                link_ns += its_ns
            if not backward:
                move_ns = self._move(last_bytes, last, placed.join, at_ns)
                at_ns += move_ns
            lanes[lane] = at_ns, link_ns + move_ns
        ends_ns, links_ns = zip(*lanes.values(), strict=True)
        return max(ends_ns), max(links_ns)

    def _move(self, sample_bytes: int, source: Place, target: Place, now_ns: int) -> int:
        """How long a move takes that begins at ``now_ns``."""
        took_ns = self._task.cluster.move_ns(self._batch, sample_bytes, source, target)
        wider = max(source, target, key=lambda place: place.width)
        self._take(wider.devices, now_ns, now_ns + took_ns, "move", "move")
        return took_ns

    def _take(
        self, devices: Sequence[int], start_ns: int, end_ns: int, name: str, kind: str
    ) -> None:
        self._device_ns += len(devices) * (end_ns - start_ns)
        if end_ns > start_ns:
            self._spans += [Span(device, start_ns, end_ns, name, kind) for device in devices]


_Step = tuple[Layer | Branches, Place | PlacedBranches, Place | None, int]


def _steps(chain: Chain, plan: Plan, source: Place | None, sample_bytes: int) -> list[_Step]:
    """Items with their places, where what they read is, and its bytes per sample."""
    steps: list[_Step] = []
    for item, placed in zip(chain, plan, strict=True):
        steps.append((item, placed, source, sample_bytes))
        source, sample_bytes = placed.end, item.output_bytes
    return steps
