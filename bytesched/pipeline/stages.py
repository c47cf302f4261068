"""Stages: what they take, from a profile, which part of a model each is, and which rank has it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

from bytesched.bench.profile import SHIPPED_FOLDER, parse_profile, read_profile
from bytesched.errors import ConfigError
from bytesched.files import read_text
from bytesched.pipeline.order import Action, Kind
from bytesched.records import from_json
from bytesched.values import shown

_MOST_S = 1e6
_MOST_BYTES = 1 << 50
PLACEMENTS = ("v", "interleaved", "x")


@dataclass(frozen=True, slots=True)
class Stage:
    """What one micro-batch takes in one stage, and the bytes of the stage itself."""

    forward_s: float
    #: of the two halves of a backward: the gradient of the input, and those of the weights
    input_gradient_s: float
    weight_gradient_s: float
    #: held from the start of a forward to the end of its backward
    activation_bytes: int = 0
    #: what the next stage reads; its gradient comes back with as many
    output_bytes: int = 0
    parameter_bytes: int = 0

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.input_gradient_s + self.weight_gradient_s


class Link(NamedTuple):
    """What connects two ranks; messages do not wait for each other."""

    bytes_per_s: float
    latency_s: float = 0.0

    def seconds(self, nbytes: int) -> float:
        """How long a message is on its way."""
        return self.latency_s + nbytes / self.bytes_per_s


#: where crossings cost nothing
FREE = Link(float("inf"))


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages on ranks, as ``torch.distributed.pipelining`` runs them.

    There, the first stage has no gradient of its input to compute: its ``I`` does nothing, and its
    ``W`` is a whole backward.
    """

    stages: tuple[Stage, ...]
    stage_ranks: tuple[int, ...]
    link: Link = FREE
    #: copies of the pipeline, among which gradients are reduced
    replicas: int = 1

    @property
    def ranks(self) -> int:
        return 1 + max(self.stage_ranks)

    def on(self, rank: int) -> list[int]:
        """The stages of a rank."""
        return [stage for stage, its in enumerate(self.stage_ranks) if its == rank]

    def kinds(self, stage: int, split_backward: bool) -> tuple[Kind, ...]:
        """What a micro-batch does in a stage; the first one's backward is never worth a cut."""
        if split_backward and stage:
            return (Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
        return (Kind.FORWARD, Kind.BACKWARD)

    def seconds(self, stage: int, kind: Kind) -> float:
        times = self.stages[stage]
        whole_s = times.input_gradient_s + times.weight_gradient_s
        return {
            Kind.FORWARD: times.forward_s,
            Kind.BACKWARD: whole_s,
            Kind.INPUT_GRADIENT: times.input_gradient_s if stage else 0.0,
            Kind.WEIGHT_GRADIENT: times.weight_gradient_s if stage else whole_s,
        }[kind]

    def crossing_s(self, stage: int, other: int) -> float:
        """How long an activation or its gradient travels between neighbours."""
        if self.stage_ranks[stage] == self.stage_ranks[other]:
            return 0.0
        return self.link.seconds(self.stages[min(stage, other)].output_bytes)

    def reduction_s(self, stage: int) -> float:
        """How long the gradients of a stage are on the link of its rank, by a ring."""
        share = 2 * (self.replicas - 1) / self.replicas
        return share * self.stages[stage].parameter_bytes / self.link.bytes_per_s

    def held_bytes(self, action: Action) -> int:
        """What an action adds to the memory of its rank; below 0 for what its end frees."""
        held = self.stages[action.stage].activation_bytes
        if action.kind is Kind.FORWARD:
            return held
        return 0 if action.kind is Kind.INPUT_GRADIENT else -held

    def work_s(self, rank: int) -> float:
        """Seconds of one micro-batch on a rank."""
        return sum(self.stages[stage].compute_s for stage in self.on(rank))

    def least_memory_bytes(self) -> int:
        """What the fullest rank holds at least: all its stages, since forwards come first."""
        return max(
            sum(self.stages[stage].activation_bytes for stage in self.on(rank))
            for rank in range(self.ranks)
        )


def partition(size: int, parts: int, cost: Callable[[int, int], float]) -> list[int]:
    """The bounds of ``parts`` runs of ``size`` things, ``parts + 1`` of them, no run empty.

    The largest ``cost(start, stop)`` of a run is the least that any cut has; of equal cuts it is
    one with a small sum of squares.
    """
    # best[stop]: of the first `stop` in so many parts, (largest, squares, bounds).
    best: list[tuple[float, float, tuple[int, ...]] | None] = [(0.0, 0.0, (0,))] + [None] * size
    for _ in range(parts):
        following: list[tuple[float, float, tuple[int, ...]] | None] = [None] * (size + 1)
        for stop in range(1, size + 1):
            # Rounding must not decide between cuts that are equal.
            choices = (
                (round(max(most, last), 12), round(squares + last**2, 12), (*bounds, stop))
                for start, before in enumerate(best[:stop])
                if before is not None
                for (most, squares, bounds), last in [(before, cost(start, stop))]
            )
            following[stop] = min(choices, default=None)
        best = following
    found = best[size]
    assert found is not None
    return list(found[2])


def cut(chain: Sequence[Stage], stages: int) -> tuple[Stage, ...]:
    """The chain in ``stages`` contiguous parts, so that the slowest part is as fast as it can be.

    Raises ``ConfigError`` if there are fewer links in the chain than parts.
    """
    if len(chain) < stages:
        raise ConfigError(f"{len(chain)} layers cannot be cut into {stages} stages")
    until = [0.0, *accumulate(each.compute_s for each in chain)]
    bounds = partition(len(chain), stages, lambda start, stop: until[stop] - until[start])
    return tuple(_joined(chain[start:stop]) for start, stop in pairwise(bounds))


def _joined(chain: Sequence[Stage]) -> Stage:
    total = Stage(*map(sum, zip(*map(astuple, chain), strict=True)))
    return replace(total, output_bytes=chain[-1].output_bytes)


@dataclass(frozen=True)
class _Listed:
    """A stage as a file lists it: its backward as a whole, or in halves."""

    forward_s: float
    backward_s: float | None = None
    backward_input_s: float | None = None
    backward_weight_s: float | None = None
    activation_bytes: int = 0
    output_bytes: int = 0
    parameter_bytes: int = 0
    #: for people
    name: object = ""

    def stage(self) -> Stage:
        """Raises ``ValueError`` for what no stage has."""
        halves = self.backward_input_s, self.backward_weight_s
        if self.backward_s is not None:
            if halves != (None, None):
                raise ValueError("backward_s is there beside its halves, expected one of both")
            halves = self.backward_s / 2, self.backward_s / 2
        input_s, weight_s = halves
        if input_s is None or weight_s is None:
            raise ValueError(
                "backward_s is missing, or one of its halves, backward_input_s and "
                "backward_weight_s"
            )
        if not all(0 <= time_s <= _MOST_S for time_s in (self.forward_s, input_s, weight_s)):
            raise ValueError(f"times are expected from 0 to {_MOST_S:.0f} s")
        sizes = self.activation_bytes, self.output_bytes, self.parameter_bytes
        if not all(0 <= size < _MOST_BYTES for size in sizes):
            raise ValueError(f"sizes are expected from 0 to {_MOST_BYTES} bytes")
        return Stage(self.forward_s, input_s, weight_s, *sizes)


def load_chain(name_or_path: str) -> tuple[Stage, ...]:
    """The layers of a profile of ``bytesched bench``, or the stages of a file that lists those.

    A layer's backward is cut in halves, and it holds what it hands to the next layer. A list of
    ``stages`` says all that itself. Raises ``ConfigError`` that names stage or layer, and field.
    """
    content, origin = read_profile(name_or_path, SHIPPED_FOLDER)
    if isinstance(content, dict) and "stages" in content:
        stages = content["stages"]
        if not isinstance(stages, list) or not stages:
            raise ConfigError(f"profile {origin}: stages is {shown(stages)}, expected a list")
        chain = []
        for number, each in enumerate(stages):
            try:
                chain.append(from_json(_Listed, json.dumps(each)).stage())
            except ValueError as error:
                text = str(error).replace(_Listed.__name__, "it")
                raise ConfigError(f"profile {origin}, stage {number}: {text}") from None
        if not any(each.compute_s for each in chain):
            raise ConfigError(f"profile {origin}: every stage takes 0 s")
        return tuple(chain)
    profile = parse_profile(content, origin)
    samples = max(1, profile.batch)
    return tuple(
        Stage(
            layer.forward_ms / 1e3,
            # Without weights, all of a backward is for the layer before.
            layer.backward_ms / (2e3 if layer.nbytes else 1e3),
            layer.backward_ms / 2e3 if layer.nbytes else 0.0,
            layer.output_bytes * samples,
            layer.output_bytes * samples,
            layer.nbytes,
        )
        for layer in profile.layers
    )


def placed(name: str, ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """The rank of each stage.

    "interleaved" goes round (0, 1, 0, 1), "v" there and back (0, 1, 1, 0). Raises ``ConfigError``
    for "x", two copies of the model in opposite directions (Chimera, Li and Hoefler, SC 2021).
    """
    there = tuple(range(ranks))
    if name == "interleaved":
        return there * stages_per_rank
    if name == "v":
        turns = (there if turn % 2 == 0 else there[::-1] for turn in range(stages_per_rank))
        return tuple(rank for turn in turns for rank in turn)
    raise ConfigError(
        f"placement {name}: every stage would be on two ranks, and torch puts a stage on one "
        "rank; v has the same form with one copy of the model"
    )


def read_placement(path: str, ranks: int) -> tuple[int, ...]:
    """The rank of each stage from a JSON file with a list such as ``[0, 1, 1, 0]``.

    Raises ``ConfigError`` with what is wrong in the file.
    """
    try:
        content = json.loads(read_text(Path(path)))
    except OSError as error:
        raise ConfigError(f"placement {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"placement {path} is not valid JSON: {error}") from None
    if not isinstance(content, list) or not content:
        raise ConfigError(
            f"placement {path} is {shown(content)}, expected a list with the rank of each stage, "
            "such as [0, 1, 1, 0]"
        )
    for stage, rank in enumerate(content):
        if type(rank) is not int or not 0 <= rank < ranks:
            raise ConfigError(
                f"placement {path}: stage {stage} is on {shown(rank)}; torch puts a stage on one "
                f"rank, from 0 to {ranks - 1}"
            )
    if missing := set(range(ranks)).difference(content):
        raise ConfigError(f"placement {path}: rank {min(missing)} has no stage")
    return tuple(content)
