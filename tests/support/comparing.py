"""Scripts whose scheduled run must equal the plain one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from types import ModuleType
from typing import Any

import pytest
from ranks import Ranks, address_of
from training import Job, compare

Figures = dict[str, int | float | str]
Script = Callable[..., None]
#: a script, and what it is given
Case = tuple[Any, ...]


def of(module: ModuleType, names: str) -> list[Case]:
    """Cases of scripts of a module that are given nothing."""
    return [(getattr(module, name),) for name in names.split()]


def each(script: Script, *values: Iterable[Any]) -> list[Case]:
    """A case for each choice of the values."""
    return [(script, *args) for args in product(*values)]


def cases(*given: Case, nightly: Sequence[Case] = ()) -> pytest.MarkDecorator:
    """A test for each script and its arguments, by their names."""
    rows = [
        pytest.param(script, args, id="-".join([script.__name__, *map(str, args)]), marks=marks)
        for some, marks in ((given, ()), (nightly, pytest.mark.nightly))
        for script, *args in some
    ]
    return pytest.mark.parametrize(("script", "args"), rows)


def check(
    ranks: Ranks,
    script: Script,
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
