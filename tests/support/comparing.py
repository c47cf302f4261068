"""Scripts whose scheduled run must equal the plain one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ranks import Ranks, address_of
from training import Job, compare

Figures = dict[str, int | float | str]


def named(*scripts: Callable[..., None]) -> pytest.MarkDecorator:
    """A test for each of the scripts, by its name."""
    return pytest.mark.parametrize("script", scripts, ids=lambda script: script.__name__)


def check(
    ranks: Ranks,
    script: Callable[..., None],
    *args: Any,
    mode: str = "cross",
    rtol: float = 0.0,
    kind: type[Job] = Job,
    **options: Any,
) -> list[Figures]:
    """Each rank's figures of the wrapped run, after it was found equal to the plain one.

    Args:
        mode: in which it ends; empty: in any, the same on all ranks.
        kind: of both runs.
    """
    outcomes = ranks.run(compare, address_of(script), args, options, rtol, kind)
    for rank, (found, _) in enumerate(outcomes):
        assert not found, f"rank {rank}:\n" + "\n".join(found[:20])
    figures = [stats for _, stats in outcomes]
    modes = [stats["mode"] for stats in figures]
    assert modes == [mode or modes[0]] * ranks.world_size
    return figures
