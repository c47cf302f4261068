"""A plan beside what it competes with: plain data parallelism, and devices divided for good.

Throughput is counted in devices, as DeepPool does: a job that trains as fast as on one device of
its own adds 1. The background job needs one device; so the foreground adds (time on one device) /
(its time), and the background adds the share of time that it gets, summed over the devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bytesched.burst.cost import Place, PlacedBranches, Plan, Schedule, Task, schedule
from bytesched.burst.graph import Chain, Layer


@dataclass(frozen=True, slots=True)
class Point:
    """One way to use the devices of a cluster."""

    label: str
    time_ns: int
    #: in devices
    foreground: float
    background: float

    @property
    def total(self) -> float:
        """Throughput of both jobs, in devices."""
        return self.foreground + self.background

    def to_json(self) -> dict[str, float | str]:
        """The point in a result file."""
        return {
            "label": self.label,
            "iteration_ms": self.time_ns / 1e6,
            "foreground_devices": round(self.foreground, 4),
            "background_devices": round(self.background, 4),
            "total_devices": round(self.total, 4),
        }


def uniform_plan(chain: Chain, place: Place) -> Plan:
    """Every layer on the same devices: data parallelism."""
    plan: list[Place | PlacedBranches] = []
    for item in chain:
        if isinstance(item, Layer):
            plan.append(place)
        else:
            branches = tuple(uniform_plan(branch, place) for branch in item.branches)
            plan.append(PlacedBranches(branches, (0,) * len(branches), place))
    return tuple(plan)


def gaps_ns(timeline: Schedule, devices: int) -> list[list[tuple[int, int]]]:
    """For each device, the stretches of an iteration in which it neither computes nor moves."""
    found = []
    for device in range(devices):
        free_ns, gaps = 0, []
        spans = [span for span in timeline.spans if span.device == device]
        for span in sorted(spans, key=lambda span: span.start_ns):
            if span.start_ns > free_ns:
                gaps.append((free_ns, span.start_ns))
            free_ns = max(free_ns, span.end_ns)
        if timeline.time_ns > free_ns:
            gaps.append((free_ns, timeline.time_ns))
        found.append(gaps)
    return found


def burst_point(task: Task, label: str, timeline: Schedule, step_ns: int) -> Point:
    """A plan with a background job on every device, in the gaps that whole steps fit into."""
    usable_ns = sum(
        (end - start) // step_ns * step_ns
        for gaps in gaps_ns(timeline, task.cluster.devices)
        for start, end in gaps
    )
    alone_ns = task.graph.single_device_ns
    return Point(label, timeline.time_ns, alone_ns / timeline.time_ns, usable_ns / timeline.time_ns)


def data_parallel(task: Task, width: int, label: str, background: int = 0) -> Point:
    """Data parallelism on so many devices, background jobs on others."""
    timeline = schedule(task, uniform_plan(task.graph.chain, Place(0, width)))
    foreground = task.graph.single_device_ns / timeline.time_ns
    return Point(label, timeline.time_ns, foreground, background)


def static_partitions(task: Task) -> Iterator[Point]:
    """The devices divided for good: data parallelism on some, background jobs on the others."""
    devices = task.cluster.devices
    for width in task.graph.widths(devices - 1):
        rest = devices - width
        yield data_parallel(task, width, f"static {width}/{rest}", background=rest)
