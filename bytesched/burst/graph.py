"""What the planner plans: layers in chains and branches, and their times by batch size."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from bytesched.bench.profile import Profile, parse_profile, profiles_in, read_profile
from bytesched.errors import ConfigError

SHIPPED_FOLDER = Path(__file__).parent / "profiles"


@dataclass(frozen=True, slots=True)
class Curve:
    """The time of a layer by batch size, measured at some sizes, lines in between.

    Below the smallest size a layer takes as long as there: nothing shows that it would be faster.
    Above the largest the last line goes on.
    """

    #: (samples, ns), by samples
    points: tuple[tuple[int, int], ...]

    def ns(self, samples: int) -> int:
        """Nanoseconds for a batch of so many samples."""
        sizes = [size for size, _ in self.points]
        if samples <= sizes[0] or len(sizes) == 1:
            return self.points[0][1]
        right = min(bisect_left(sizes, samples), len(sizes) - 1)
        (a, a_ns), (b, b_ns) = self.points[right - 1], self.points[right]
        return max(0, a_ns + (b_ns - a_ns) * (samples - a) // (b - a))


@dataclass(frozen=True, slots=True)
class Layer:
    """What is computed as a whole on one number of devices."""

    name: str
    forward: Curve
    backward: Curve
    parameter_bytes: int
    #: of one sample: what the next layer reads
    output_bytes: int

    def compute_ns(self, samples: int) -> int:
        """Nanoseconds of forward and backward for so many samples."""
        return self.forward.ns(samples) + self.backward.ns(samples)


@dataclass(frozen=True, slots=True)
class Branches:
    """Chains that read one tensor and are joined again; an empty chain is a shortcut."""

    name: str
    branches: tuple[Chain, ...]
    #: of one sample: what the next layer reads
    output_bytes: int


Item = Layer | Branches
Chain = tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class ModelGraph:
    """A model that begins with a layer, for one global batch."""

    name: str
    description: str
    #: samples of all devices together
    batch: int
    chain: Chain
    #: why times of other batch sizes are not what was measured; empty if they are
    assumed: str = ""

    @property
    def single_device_ns(self) -> int:
        """Nanoseconds of forward and backward of the whole batch on one device."""
        return sum(layer.compute_ns(self.batch) for layer in layers_of(self.chain))

    def widths(self, devices: int) -> tuple[int, ...]:
        """Numbers of devices, up to `devices`, that the batch can be split over evenly."""
        return tuple(n for n in range(1, devices + 1) if self.batch % n == 0)


def layers_of(chain: Chain) -> Iterator[Layer]:
    """Every layer, also those in branches, in the order of the forward pass."""
    for item in chain:
        if isinstance(item, Layer):
            yield item
        else:
            for branch in item.branches:
                yield from layers_of(branch)


def shipped_graphs() -> list[str]:
    """Names of the graphs that are part of the package."""
    return profiles_in(SHIPPED_FOLDER)


def load_graph(sources: Sequence[str], *, batch: int = 0, fixed_share: float) -> ModelGraph:
    """The shipped graph of that name, the one in a file, or the one that several files record.

    Args:
        sources: one name or file; or several files of `bytesched bench --record`, of one model at
            several batch sizes.
        batch: the global batch to plan for; 0: the largest that was measured.
        fixed_share: see `curve_from_one`; used where only one batch size was measured, which
            `assumed` of the graph then names.

    Raises `ConfigError` that names what is wrong, and where.
    """
    if not 0 <= fixed_share < 1:
        raise ConfigError(f"a fixed share of {fixed_share}: expected at least 0 and less than 1")
    contents = [_read(source) for source in sources]
    if "batches" in contents[0]:
        if len(contents) > 1:
            raise ConfigError(f"{sources[0]} holds several batch sizes: give it alone")
        graph = _parse_graph(contents[0], sources[0], fixed_share)
    else:
        graph = _recorded(
            [parse_profile(c, s) for c, s in zip(contents, sources, strict=True)], fixed_share
        )
    return replace(graph, batch=batch) if batch else graph


def curve_from_one(samples: int, ns: int, fixed_share: float) -> Curve:
    """A curve from one measurement.

    ``t(b) = t(B) (phi + (1 - phi) b / B)``: a share phi of the time does not shrink with the batch
    (launches, reading weights, a device that is not filled). The true share differs from layer
    to layer; two measured batch sizes make the guess unnecessary.
    """
    fixed_ns = round(ns * fixed_share)
    return Curve(((1, fixed_ns + (ns - fixed_ns) // samples), (samples, ns))[samples == 1 :])


def _curve(points: tuple[tuple[int, int], ...], fixed_share: float) -> Curve:
    return Curve(points) if len(points) > 1 else curve_from_one(*points[0], fixed_share)


def _assumed(batches: Sequence[int], fixed_share: float) -> str:
    if len(batches) > 1:
        return ""
    return (
        f"only batch size {batches[0]} was measured: of each layer's time there, {fixed_share:.0%} "
        "are taken not to shrink with the batch, the rest in proportion (--fixed-share); "
        "profiles of other batch sizes make this unnecessary"
    )


def _read(source: str) -> dict[str, Any]:
    content, path = read_profile(source, SHIPPED_FOLDER)
    if not isinstance(content, dict):
        raise ConfigError(f"profile {path}: expected an object, found {type(content).__name__}")
    return content


def _recorded(profiles: Sequence[Profile], fixed_share: float) -> ModelGraph:
    """The chain of layers that profiles of one model, at different batch sizes, describe."""
    ordered = sorted(profiles, key=lambda profile: profile.batch)
    first = ordered[0]
    for profile in ordered:
        if profile.batch < 1:
            raise ConfigError(
                f"profile {profile.name}: it has no batch size; record it "
                'with `bytesched bench --record`, or add "batch"'
            )
        if [layer.name for layer in profile.layers] != [layer.name for layer in first.layers]:
            raise ConfigError(f"profiles {first.name} and {profile.name} have different layers")
        if len(profile.layers) > 1 and not any(layer.output_bytes for layer in profile.layers):
            raise ConfigError(
                f"profile {profile.name}: it lacks what its layers hand on; record it again "
                'with `bytesched bench --record`, or add "output_bytes" to its layers'
            )
    for smaller, larger in pairwise(ordered):
        if smaller.batch == larger.batch:
            raise ConfigError(f"batch size {larger.batch} is there twice")

    def curve(index: int, field: str) -> Curve:
        points = tuple(
            (profile.batch, round(1e6 * getattr(profile.layers[index], field)))
            for profile in ordered
        )
        return _curve(points, fixed_share)

    layers = [
        Layer(
            layer.name,
            curve(index, "forward_ms"),
            curve(index, "backward_ms"),
            layer.nbytes,
            layer.output_bytes,
        )
        for index, layer in enumerate(first.layers)
    ]
    assumed = _assumed([profile.batch for profile in ordered], fixed_share)
    return ModelGraph(first.name, first.description, ordered[-1].batch, tuple(layers), assumed)


def _parse_graph(content: dict[str, Any], origin: str, fixed_share: float) -> ModelGraph:
    batches = content["batches"]
    if not (
        isinstance(batches, list)
        and batches
        and all(type(size) is int and size > 0 for size in batches)
        and batches == sorted(set(batches))
    ):
        raise ConfigError(f"profile {origin}: batches is {batches!r}, expected growing sizes")
    chain = _parse_chain(content.get("layers"), batches, fixed_share, f"profile {origin}")
    if not chain or not isinstance(chain[0], Layer):
        raise ConfigError(f"profile {origin}: a model begins with a layer")
    return ModelGraph(
        str(content.get("name", Path(origin).stem)),
        str(content.get("description", "")),
        batches[-1],
        chain,
        _assumed(batches, fixed_share),
    )


def _parse_chain(content: object, batches: Sequence[int], fixed_share: float, where: str) -> Chain:
    if not isinstance(content, list):
        raise ConfigError(f"{where}: expected a list of layers, found {content!r}")
    return tuple(
        _parse_item(item, batches, fixed_share, f"{where}, layer {index}")
        for index, item in enumerate(content)
    )


def _parse_item(content: object, batches: Sequence[int], fixed_share: float, where: str) -> Item:
    if not isinstance(content, dict):
        raise ConfigError(f"{where}: expected an object, found {content!r}")
    name = str(content.get("name", where.rpartition(" ")[2]))
    output_bytes = _count(content, "output_bytes", where)
    if "branches" not in content:
        forward, backward = (
            _parse_curve(content.get(f"{kind}_ms"), batches, fixed_share, f"{where}, {kind}_ms")
            for kind in ("forward", "backward")
        )
        parameter_bytes = _count(content, "parameter_bytes", where)
        return Layer(name, forward, backward, parameter_bytes, output_bytes)
    if not isinstance(content["branches"], list) or not content["branches"]:
        raise ConfigError(f"{where}: expected a list of branches")
    branches = tuple(
        _parse_chain(branch, batches, fixed_share, f"{where}, branch {index}")
        for index, branch in enumerate(content["branches"])
    )
    for index, branch in enumerate(branches):
        if branch and not isinstance(branch[0], Layer):
            raise ConfigError(f"{where}, branch {index}: a branch begins with a layer")
    return Branches(name, branches, output_bytes)


def _parse_curve(content: object, batches: Sequence[int], fixed_share: float, where: str) -> Curve:
    if not isinstance(content, list) or len(content) != len(batches):
        raise ConfigError(f"{where}: expected a time for each of {len(batches)} batch sizes")
    for value in content:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
            raise ConfigError(f"{where}: {value!r} is no time in milliseconds")
    times_ns = (round(1e6 * value) for value in content)
    return _curve(tuple(zip(batches, times_ns, strict=True)), fixed_share)


def _count(content: dict[str, Any], field: str, where: str) -> int:
    value = content.get(field)
    if type(value) is not int or value < 0:
        raise ConfigError(f"{where}: {field} is {value!r}, expected a number of bytes")
    return value
