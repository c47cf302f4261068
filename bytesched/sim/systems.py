"""The systems that are compared, as what every rank does in an iteration."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import prod

from bytesched.bench.profile import ELEMENT_BYTES, Profile
from bytesched.link.cluster import Bundle, Job, Work
from bytesched.link.fabric import Cores, Fabric
from bytesched.values import parse_size

#: those whose predictions were held against the lab (docs/results.md)
SYSTEMS = ("ddp", "ddp-best", "bytesched")
BUCKETS_MB = (1, 2, 4, 8, 16, 25)
#: of bytesched's buckets and chunks, where nothing is set: over Gloo, and over NCCL
#: (plugins/c10d/attaching.py)
CHUNK_MB, NCCL_CHUNK_MB = 1, 16
#: of DDP without arguments: its first bucket, and all others
FIRST_BUCKET_MB = 1
DEFAULT_BUCKET_MB = 25
MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuCosts:
    """CPU time that a system takes on each rank, at full speed."""

    #: of each message of a collective, of which it costs two more by itself
    message_s: float = 0.0
    #: of each gradient in backward: its hooks
    tensor_s: float = 0.0
    #: of each byte of a collective
    byte_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a rank's processor takes beside the model's own computation, and what it has."""

    #: bytes of gradients that the optimizer applies per second
    update_bytes_per_s: float
    #: of gradients that DDP copies into its buckets, and out of them, where these are no views
    copy_bytes_per_s: float = math.inf
    #: what each gradient costs backward besides computing it, whatever the system: its memory
    tensor_s: float = 0.0
    #: cores that a training step keeps busy without communication: 0 beside an accelerator
    cpu_load: float = 0.0
    #: of bytesched, and of all others
    scheduled: CpuCosts = CpuCosts()
    plain: CpuCosts = CpuCosts()
    cores: Cores = field(default_factory=Cores)


#: as `bytesched sim --measure` found them on the machine of docs/results.md
LAB_COSTS = Costs(
    update_bytes_per_s=7.8e9,
    copy_bytes_per_s=19e9,
    scheduled=CpuCosts(message_s=125e-6, tensor_s=6e-6, byte_s=1.1e-9),
    plain=CpuCosts(message_s=65e-6, tensor_s=2e-6, byte_s=1.1e-9),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """How many times as long a rank's threads take, as they share cores."""

    forward: float = 1.0
    backward: float = 1.0
    #: hooks and copies of the backward pass, and updates
    hooks: float = 1.0
    update: float = 1.0


@dataclass(frozen=True)
class Model:
    """A profile, and whether its script clips by the norm of all gradients."""

    profile: Profile
    costs: Costs
    clip: bool = False
    stretch: Stretch = Stretch()

    @property
    def forward_s(self) -> tuple[float, ...]:
        return tuple(self.stretch.forward * layer.forward_ms / 1e3 for layer in self.profile.layers)

    @property
    def backward_s(self) -> tuple[float, ...]:
        return tuple(
            self.stretch.backward * layer.backward_ms / 1e3
            + self.stretch.hooks * len(layer.shapes) * self.costs.tensor_s
            for layer in self.profile.layers
        )

    def beside(self, *, backward: float, afterwards: float) -> Model:
        """The same beside communication that wants so many cores, during and after backward."""
        cores, load = self.costs.cores, self.costs.cpu_load
        return replace(
            self,
            stretch=Stretch(
                forward=cores.stretch(load, afterwards),
                backward=cores.stretch(load, backward),
                hooks=cores.stretch(1.0, backward),
                update=cores.stretch(1.0, afterwards),
            ),
        )

    def tensors(self) -> list[tuple[int, int]]:
        """Layer and bytes of each gradient, in forward order."""
        return [
            (index, ELEMENT_BYTES * prod(shape))
            for index, layer in enumerate(self.profile.layers)
            for shape in layer.shapes
        ]

    def update_s(self, nbytes: float) -> float:
        """How long the optimizer takes for gradients of so many bytes."""
        return self.stretch.update * nbytes / self.costs.update_bytes_per_s

    def whole(self, jobs: int) -> tuple[tuple[Bundle, ...], tuple[int, ...]]:
        """Bundles and gates of a step that waits for everything."""
        whole = Bundle(tuple(range(jobs)), self.update_s(self.profile.nbytes))
        return (whole,), (0,) * len(self.profile.layers)


def buckets(model: Model, bucket_mb: float | None = None, *, are_views: bool = False) -> Work:
    """DistributedDataParallel: buckets as backward fills them, then `step()` for all.

    A bucket is closed by the gradient that brings it to its size (torch's reducer.cpp).

    Args:
        bucket_mb: its ``bucket_cap_mb``; without one, the first bucket is smaller than the others.
        are_views: whether gradients lie in the buckets (gradient_as_bucket_view), else they are
            copied there and back.
    """
    jobs: list[Job] = []
    nbytes = 0
    size_mb = FIRST_BUCKET_MB if bucket_mb is None else bucket_mb
    for number, (layer, size) in reversed(list(enumerate(model.tensors()))):
        nbytes += size
        if nbytes >= size_mb * MIB or not number:
            jobs.append(Job(nbytes, len(jobs), layer))
            nbytes = 0
            size_mb = DEFAULT_BUCKET_MB if bucket_mb is None else bucket_mb
    bundles, gates = model.whole(len(jobs))
    backward_s = model.backward_s
    if not are_views:
        [whole] = bundles
        byte_s = 1.0 / model.costs.copy_bytes_per_s
        out_s = model.stretch.update * model.profile.nbytes * byte_s
        bundles = (replace(whole, update_s=whole.update_s + out_s),)
        backward_s = tuple(
            each_s + model.stretch.hooks * layer.nbytes * byte_s
            for each_s, layer in zip(backward_s, model.profile.layers, strict=True)
        )
    return Work(
        forward_s=model.forward_s,
        backward_s=backward_s,
        jobs=tuple(jobs),
        bundles=bundles,
        bundle_of=gates,
    )


def scheduled(model: Model, fabric: Fabric, options: Mapping[str, str]) -> Work:
    """bytesched: buckets cut into chunks, the most urgent first; each layer waits for its own.

    Where the script clips, its step waits for all of them.
    """
    chunk_mb = CHUNK_MB if fabric.overlaps else NCCL_CHUNK_MB
    chunk_bytes = parse_size(options.get("partition_bytes", 0)) or chunk_mb * MIB
    jobs: list[Job] = []
    #: chunks in which the gradients of a layer lie
    chunks_of: dict[int, list[int]] = {}
    bucket: list[tuple[int, int]] = []
    for number, (layer, size) in reversed(list(enumerate(model.tensors()))):
        bucket.append((layer, size))
        if sum(nbytes for _, nbytes in bucket) >= chunk_bytes or not number:
            for nbytes, layers in _cut(bucket, chunk_bytes):
                for each in layers:
                    chunks_of.setdefault(each, []).append(len(jobs))
                jobs.append(Job(nbytes, min(layers), layer))
            bucket.clear()
    if model.clip:
        bundles, gates = model.whole(len(jobs))
    else:
        with_gradients = sorted(chunks_of)
        bundles = tuple(
            Bundle(tuple(chunks_of[each]), model.update_s(model.profile.layers[each].nbytes))
            for each in with_gradients
        )
        number_of = {each: number for number, each in enumerate(with_gradients)}
        gates = tuple(number_of.get(each, -1) for each in range(len(model.profile.layers)))
    return Work(
        forward_s=model.forward_s,
        backward_s=model.backward_s,
        jobs=tuple(jobs),
        bundles=bundles,
        bundle_of=gates,
        is_planned=True,
        policy=options.get("policy", "priority"),
        credit_bytes=parse_size(options.get("credit_bytes", 0)),
    )


def _cut(bucket: Sequence[tuple[int, int]], chunk_bytes: int) -> Iterator[tuple[int, list[int]]]:
    """Bytes and layers of the chunks of a bucket: parts alike (plugins/planned/cutting.py)."""
    ends = list(accumulate(nbytes for _, nbytes in bucket))
    total = ends[-1]
    count = max(1, round(total / chunk_bytes))
    for part in range(count):
        start, stop = total * part // count, total * (part + 1) // count
        inside = {
            layer
            for (layer, nbytes), end in zip(bucket, ends, strict=True)
            if end > start and end - nbytes < stop
        }
        yield stop - start, sorted(inside)
