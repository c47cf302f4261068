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

from bytesched.burst.graph import Chain, Layer, ModelGraph


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices that are alike, and the link of each."""

    devices: int
    bytes_per_s: float
    #: of one move
    latency_s: float

    @property
    def latency_ns(self) -> int:
        """Of one move, in ns."""
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
        """Their numbers."""
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
        chain = self._task.graph.chain
        turn_ns = now_ns = self._chain(chain, plan, None, 0, 0, backward=False)
        link_free_ns = now_ns
        for index in reversed(range(len(plan))):
            source = plan[index - 1].end if index else None
            sample_bytes = chain[index - 1].output_bytes if index else 0
            one, placed = chain[index : index + 1], plan[index : index + 1]
            began_ns = now_ns
            now_ns = self._chain(one, placed, source, sample_bytes, began_ns, backward=True)
            link_free_ns = max(link_free_ns, now_ns) + self._link_ns(
                one, placed, source, sample_bytes
            )
        assert turn_ns <= now_ns
        time_ns = max(now_ns, link_free_ns)
        return Schedule(time_ns, now_ns, self._device_ns, tuple(self._spans))

    def _chain(
        self,
        chain: Chain,
        plan: Plan,
        source: Place | None,
        sample_bytes: int,
        now_ns: int,
        *,
        backward: bool,
    ) -> int:
        """When a chain that begins at `now_ns` is done; `source` has what it reads."""
        steps = []
        for item, placed in zip(chain, plan, strict=True):
            steps.append((item, placed, source, sample_bytes))
            source, sample_bytes = placed.end, item.output_bytes
        for item, placed, before, nbytes in reversed(steps) if backward else steps:
            if isinstance(item, Layer):
                assert isinstance(placed, Place)
                now_ns = self._layer(item, placed, before, nbytes, now_ns, backward=backward)
                continue
            assert isinstance(placed, PlacedBranches)
            assert before is not None
            ends_ns: dict[int, int] = {}
            branches = list(zip(item.branches, placed.branches, placed.lanes, strict=True))
            for branch, places, lane in reversed(branches) if backward else branches:
                start_ns = ends_ns.get(lane, now_ns)
                last = places[-1].end if places else before
                last_bytes = branch[-1].output_bytes if branch else nbytes
                if backward:
                    start_ns = self._move(last_bytes, last, placed.join, start_ns)
                end_ns = self._chain(branch, places, before, nbytes, start_ns, backward=backward)
                if not backward:
                    end_ns = self._move(last_bytes, last, placed.join, end_ns)
                ends_ns[lane] = end_ns
            now_ns = max(ends_ns.values())
        return now_ns

    def _layer(
        self,
        layer: Layer,
        place: Place,
        source: Place | None,
        sample_bytes: int,
        now_ns: int,
        *,
        backward: bool,
    ) -> int:
        if source is not None and not backward:
            now_ns = self._move(sample_bytes, source, place, now_ns)
        samples = self._batch // place.width
        curve = layer.backward if backward else layer.forward
        end_ns = now_ns + curve.ns(samples)
        kind = "backward" if backward else "forward"
        self._take(place.devices, now_ns, end_ns, layer.name, kind)
        if source is not None and backward:
            end_ns = self._move(sample_bytes, source, place, end_ns)
        return end_ns

    def _move(self, sample_bytes: int, source: Place, target: Place, now_ns: int) -> int:
        end_ns = now_ns + self._task.cluster.move_ns(self._batch, sample_bytes, source, target)
        wider = max(source, target, key=lambda place: place.width)
        self._take(wider.devices, now_ns, end_ns, "move", "move")
        return end_ns

    def _take(
        self, devices: Sequence[int], start_ns: int, end_ns: int, name: str, kind: str
    ) -> None:
        self._device_ns += len(devices) * (end_ns - start_ns)
        if end_ns > start_ns:
            self._spans += [Span(device, start_ns, end_ns, name, kind) for device in devices]

    def _link_ns(self, chain: Chain, plan: Plan, source: Place | None, sample_bytes: int) -> int:
        """What the gradients of a chain, and its moves in backward, take of the busiest link."""
        cluster, batch = self._task.cluster, self._batch
        total_ns = 0
        for item, placed in zip(chain, plan, strict=True):
            if isinstance(item, Layer):
                assert isinstance(placed, Place)
                total_ns += cluster.gradients_ns(item, placed.width)
                if source is not None:
                    total_ns += cluster.move_ns(batch, sample_bytes, source, placed)
            else:
                assert isinstance(placed, PlacedBranches)
                assert source is not None
                lanes_ns: dict[int, int] = {}
                for branch, places, lane in zip(
                    item.branches, placed.branches, placed.lanes, strict=True
                ):
                    last = places[-1].end if places else source
                    last_bytes = branch[-1].output_bytes if branch else sample_bytes
                    lanes_ns[lane] = (
                        lanes_ns.get(lane, 0)
                        + self._link_ns(branch, places, source, sample_bytes)
                        + cluster.move_ns(batch, last_bytes, last, placed.join)
                    )
                total_ns += max(lanes_ns.values())
            source, sample_bytes = placed.end, item.output_bytes
        return total_ns
