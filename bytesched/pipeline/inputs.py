"""What a plan is made of: the stages of a profile, and which rank has which."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from bytesched.bench.profile import SHIPPED_FOLDER, parse_profile, read_profile
from bytesched.errors import ConfigError
from bytesched.files import read_text
from bytesched.pipeline.stages import Stage
from bytesched.records import from_json
from bytesched.values import shown

__all__ = ["PLACEMENTS", "load_chain", "placed", "read_placement"]

_MOST_S = 1e6
_MOST_BYTES = 1 << 50
PLACEMENTS = ("v", "interleaved", "x")


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
