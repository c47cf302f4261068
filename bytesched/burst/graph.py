"""What the planner plans: layers in chains and branches, and their times by batch size."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from bytesched.bench.profile import Profile, parse_profile, profiles_in, read_profile
from bytesched.errors import ConfigError
from bytesched.records import from_json

SHIPPED_FOLDER = Path(__file__).parent / "profiles"
#: of a layer's time that does not shrink with the batch, where only one batch size was measured
FIXED_SHARE = 0.2


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


def load_graph(sources: Sequence[str], *, batch: int = 0) -> ModelGraph:
    """The shipped graph of that name, the one in a file, or the one that several files record.

    Args:
        sources: one name or file; or several files of `bytesched bench --record`, of one model at
            several batch sizes.
        batch: the global batch to plan for; 0: the largest that was measured.

    Raises `ConfigError` that names what is wrong, and where.
    """
    contents = [_read(source) for source in sources]
    model: _Model | None = None
    if "batches" not in contents[0]:
        model = _recorded([parse_profile(*each) for each in zip(contents, sources, strict=True)])
    elif len(contents) > 1:
        raise ConfigError(f"{sources[0]} holds several batch sizes: give it alone")
    try:
        if model is None:
            known = {field.name for field in fields(_Model)}
            its = {k: v for k, v in contents[0].items() if k in known}
            model = from_json(_Model, json.dumps({"name": Path(sources[0]).stem, **its}))
        batches = model.batches
        if not batches or batches[0] < 1 or list(batches) != sorted(set(batches)):
            raise ValueError(f"batches is {list(batches)}, expected growing sizes")
        chain = _chain(model.layers, batches, "the model")
        if not chain:
            raise ValueError("a model begins with a layer")
    except ValueError as error:
        why = str(error).replace(_Model.__name__, "it")
        raise ConfigError(f"profile {sources[0]}: {why}") from None
    assumed = ""
    if len(batches) == 1:
        assumed = (
            f"only batch size {batches[0]} was measured: of each layer's time there, "
            f"{FIXED_SHARE:.0%} are taken not to shrink with the batch, the rest in proportion; "
            "profiles of other batch sizes make this unnecessary"
        )
    return ModelGraph(model.name, model.description, batch or batches[-1], chain, assumed)


def curve_from_one(samples: int, ns: int) -> Curve:
    """A curve from one measurement.

    ``t(b) = t(B) (phi + (1 - phi) b / B)``: a share phi of the time does not shrink with the batch
    (launches, reading weights, a device that is not filled). The true share differs from layer
    to layer; two measured batch sizes make the guess unnecessary.
    """
    fixed_ns = round(ns * FIXED_SHARE)
    return Curve(((1, fixed_ns + (ns - fixed_ns) // samples), (samples, ns))[samples == 1 :])


def _read(source: str) -> dict[str, Any]:
    content, path = read_profile(source, SHIPPED_FOLDER)
    if not isinstance(content, dict):
        raise ConfigError(f"profile {path}: expected an object, found {type(content).__name__}")
    return content


@dataclass(frozen=True)
class _Item:
    """A layer as a file has it, with a time for each batch size; or branches."""

    output_bytes: int
    name: str | None = None
    forward_ms: tuple[float, ...] = ()
    backward_ms: tuple[float, ...] = ()
    parameter_bytes: int = 0
    branches: tuple[tuple[_Item, ...], ...] | None = None
    #: for people
    flops: object = None


@dataclass(frozen=True)
class _Model:
    batches: tuple[int, ...]
    layers: tuple[_Item, ...]
    name: str
    description: str = ""


def _recorded(profiles: Sequence[Profile]) -> _Model:
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

    items = tuple(
        _Item(
            layer.output_bytes,
            layer.name,
            tuple(profile.layers[index].forward_ms for profile in ordered),
            tuple(profile.layers[index].backward_ms for profile in ordered),
            layer.nbytes,
        )
        for index, layer in enumerate(first.layers)
    )
    batches = tuple(profile.batch for profile in ordered)
    return _Model(batches, items, first.name, first.description)


def _chain(items: Sequence[_Item], batches: Sequence[int], where: str) -> Chain:
    """Raises ``ValueError`` for what cannot be planned."""
    chain: list[Item] = []
    for number, item in enumerate(items):
        name = str(number) if item.name is None else item.name
        here = f"{where}, layer {name}"
        if min(item.output_bytes, item.parameter_bytes) < 0:
            raise ValueError(f"{here}: output_bytes and parameter_bytes: expected 0 or more")
        if item.branches is None:
            of_layer = item.forward_ms, item.backward_ms
            if not all(
                len(times_ms) == len(batches) and all(0 <= ms < 1e9 for ms in times_ms)
                for times_ms in of_layer
            ):
                raise ValueError(
                    f"{here}: forward_ms and backward_ms: expected a time in milliseconds for each "
                    f"of {len(batches)} batch sizes"
                )
            points = [
                tuple((b, round(1e6 * ms)) for b, ms in zip(batches, times_ms, strict=True))
                for times_ms in of_layer
            ]
            forward, backward = (
                Curve(each) if len(each) > 1 else curve_from_one(*each[0]) for each in points
            )
            chain.append(Layer(name, forward, backward, item.parameter_bytes, item.output_bytes))
        elif not chain:
            raise ValueError(f"{where} begins with branches: it begins with a layer")
        elif not item.branches:
            raise ValueError(f"{here}: expected a list of branches")
        else:
            branches = tuple(
                _chain(branch, batches, f"{here}, branch {index}")
                for index, branch in enumerate(item.branches)
            )
            chain.append(Branches(name, branches, item.output_bytes))
    return tuple(chain)
