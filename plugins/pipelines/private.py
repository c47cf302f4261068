"""What is private in torch.distributed.pipelining and is used here: looked for before it is used.

No version is refused by its number: one that lacks something is told what, with its own number.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Final

import torch
import torch.distributed as dist

from bytesched.errors import PluginError

log = logging.getLogger("bytesched")

SCHEDULES: Final = "torch.distributed.pipelining.schedules"
#: the oldest and the newest torch that all of it was tried with
TRIED: Final = ("2.11", "2.15")
_OF_SCHEDULE: Final = ("_n_microbatches", "_has_backward", "step")
#: of one with an order
_OF_RUNTIME: Final = ("rank",)
_OF_STAGE: Final = (
    "submod",
    "stage_index",
    "num_stages",
    "group",
    "perform_reduce_grad",
    "has_backward",
)
_OF_ACTION: Final = ("from_str", "computation_type", "stage_index", "microbatch_index")
_ORDER: Final = "pipeline_order_with_comms"
#: of a stage: what it exchanges with its neighbours before all else
_GREETING: Final = "_get_init_p2p_neighbors_ops"


def base_class() -> Any:
    """That of all schedules; None if pipelining was not imported, or has none."""
    return getattr(sys.modules.get(SCHEDULES), "_PipelineSchedule", None)


def stages_of(schedule: Any) -> list[Any]:
    """The stages of this rank, as torch has them; none of a schedule that keeps them elsewhere."""
    several = getattr(schedule, "_stages", None)
    if several:
        return list(several)
    one = getattr(schedule, "_stage", None)
    return [] if one is None else [one]


def probe_schedule(schedule: Any) -> None:
    """Raises `PluginError` unless ``schedule`` and its stages have all that is read of them."""
    _say_if_newer()
    name = type(schedule).__name__
    has_order = getattr(schedule, _ORDER, None) is not None
    _probe(schedule, (*_OF_SCHEDULE, *(_OF_RUNTIME if has_order else ())), name)
    stages = stages_of(schedule)
    if not stages:
        raise PluginError(_lacks(name, ["_stages", "_stage"]))
    for stage in stages:
        _probe(stage, _OF_STAGE, f"a stage of {name}")
    if has_order:
        actions = (action for row in getattr(schedule, _ORDER).values() for action in row)
        for action in actions:
            _probe(action, _OF_ACTION, f"an action of {name}")
            break


def runtime() -> tuple[Any, Any]:
    """The class of a schedule that takes an order, and that of its actions.

    Raises `PluginError` if this torch has none.
    """
    from torch.distributed.pipelining import schedules

    _say_if_newer()
    names = ("_PipelineScheduleRuntime", "_Action")
    _probe(schedules, names, SCHEDULES)
    kind, action = (getattr(schedules, name) for name in names)
    _probe(kind, ("_prepare_schedule_with_comms",), names[0])
    _probe(action, _OF_ACTION, names[1])
    return kind, action


def schedule_class(name: str) -> Any:
    """torch's ``Schedule`` of that name. Raises `PluginError` if this torch has none."""
    from torch.distributed.pipelining import schedules

    _say_if_newer()
    _probe(schedules, (f"Schedule{name}",), SCHEDULES)
    return getattr(schedules, f"Schedule{name}")


def skip_self_sends(stages: Sequence[Any]) -> Callable[[], None]:
    """Stages that greet their neighbours leave out those on their own rank; returns the undoing.

    Before 2.13 torch sends to itself where neighbours are on one rank, which Gloo cannot.
    """
    changed: list[weakref.ref[Any]] = []
    for stage in stages:
        if hasattr(stage, _GREETING) and _GREETING not in vars(stage):
            setattr(stage, _GREETING, partial(_greetings, weakref.ref(stage)))
            changed.append(weakref.ref(stage))

    def undo() -> None:
        for weak_stage in changed:
            if (stage := weak_stage()) is not None:
                vars(stage).pop(_GREETING, None)

    return undo


def _greetings(weak_stage: weakref.ref[Any]) -> list[Any]:
    stage = weak_stage()
    greetings = getattr(type(stage), _GREETING)(stage)
    return [each for each in greetings if each.peer != dist.get_rank()]


def _probe(thing: Any, names: Sequence[str], what: str) -> None:
    if missing := [name for name in names if not hasattr(thing, name)]:
        raise PluginError(_lacks(what, missing))


def _lacks(what: str, missing: Sequence[str]) -> str:
    return (
        f"{what} of torch {torch.__version__} has no {', '.join(missing)}, which pipelines need: "
        f"they were tried with torch {TRIED[0]} to {TRIED[1]}"
    )


@cache
def _say_if_newer() -> None:
    found = tuple(int(number) for number in torch.__version__.split(".")[:2])
    if found > tuple(int(number) for number in TRIED[1].split(".")):
        log.warning(
            "torch %s is newer than those that pipelines were tried with, %s to %s",
            torch.__version__,
            *TRIED,
        )
