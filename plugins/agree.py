"""Whether all ranks have the same model and the same settings, found out before the first send."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence

import torch

from bytesched.config import Config
from bytesched.errors import MismatchError

from .planned.bundles import Slot

#: fields of the configuration that must be the same everywhere
_SHARED_FIELDS = """
    policy partition_bytes credit_bytes compression cross_barrier guard split hierarchy shard tune
    tune_steps
"""


def statements(
    slots: Sequence[Slot], optimizer: torch.optim.Optimizer, config: Config
) -> list[str]:
    """What every plugin's ranks must agree on, a line for each."""
    return [
        *(f"{s.name} {tuple(s.parameter.shape)} {s.parameter.dtype}" for s in slots),
        f"optimizer {type(optimizer).__name__}",
        *settings(config),
    ]


def settings(config: Config) -> list[str]:
    """The settings that must be the same on all ranks, a line for each."""
    return [
        f"timeline {'on' if config.timeline else 'off'}",
        *(f"{field} = {getattr(config, field)!r}" for field in _SHARED_FIELDS.split()),
    ]


def disagreement(statements: Mapping[int, Sequence[str]], seen_by: int) -> str:
    """Where the statements of these ranks differ, in a sentence; empty if they are the same."""
    first = min(statements)
    for rank, theirs in sorted(statements.items()):
        for one, other in itertools.zip_longest(statements[first], theirs, fillvalue="nothing"):
            if one != other:
                return (
                    f"the ranks disagree: rank {first} has {one!r}, rank {rank} has {other!r} "
                    f"(seen by rank {seen_by}); all ranks need the same model and settings"
                )
    return ""


def agree(mine: list[str], rank: int, gather: Callable[[str, str], list[str]]) -> None:
    """Raises MismatchError on every rank if their statements differ; collective.

    Args:
        gather: every rank's text under a key, by rank.
    """
    text = json.dumps(mine)
    if len(set(gather("plan", hashlib.sha256(text.encode()).hexdigest()))) > 1:
        texts = gather("plan-text", text)
        raise MismatchError(disagreement(dict(enumerate(map(json.loads, texts))), rank))
