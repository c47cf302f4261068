"""Which rank has which stage."""

from __future__ import annotations

import json
from pathlib import Path

from bytesched.errors import ConfigError
from bytesched.files import read_text
from bytesched.values import shown

__all__ = ["PLACEMENTS", "placed", "read_placement"]

PLACEMENTS = ("v", "interleaved", "x")


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
        if isinstance(rank, list):
            raise ConfigError(
                f"placement {path}: stage {stage} is on {shown(rank)}; torch puts a stage on one "
                "rank"
            )
        if type(rank) is not int or not 0 <= rank < ranks:
            raise ConfigError(
                f"placement {path}: stage {stage} is on rank {shown(rank)}, expected a number "
                f"from 0 to {ranks - 1}"
            )
    for rank in range(ranks):
        if rank not in content:
            raise ConfigError(f"placement {path}: rank {rank} has no stage")
    return tuple(content)
