"""Programs for what trains: orders of pipelines, plans of DTensor, tasks of this package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from bytesched.errors import ConfigError
from bytesched.ir.pieces import Tensor
from bytesched.ir.program import Operator, Program
from bytesched.pipeline.order import Action, Kind, Order
from bytesched.task import CommTask

__all__ = ["comm_tasks", "pipeline_order", "tensor_plan"]


def pipeline_order(program: Program, stages: Sequence[Sequence[str]], replica: int = 0) -> Order:
    """The order of one replica of a pipeline; `Order.write` writes its CSV.

    Args:
        stages: the layers of each.
        replica: which part of the split ``dp``.

    Raises `ConfigError` if a rank leaves a stage before it has done all layers of a micro-batch,
    or if `Order` refuses the result.
    """
    stage_of = {layer: stage for stage, layers in enumerate(stages) for layer in layers}
    kinds = {kind.value: kind for kind in Kind}
    rows = []
    for names in program.orders.values():
        actions = []
        for name in names:
            operator = program.named[name]
            if isinstance(operator, Operator) and operator.phase in kinds:
                if operator.at("dp") != replica:
                    continue
                stage, kind = stage_of[operator.layer], kinds[operator.phase]
                actions.append(Action(stage, kind, operator.at("micro")))
        row = tuple(action for action, _ in groupby(actions))
        if row:
            rows.append(row)
    return Order(tuple(rows), "the plan")


_STYLES = {"column": "colwise", "row": "rowwise"}


def tensor_plan(program: Program, label: str = "tp") -> Mapping[str, str]:
    """How each layer with weights is split, as `parallelize_module` knows it.

    Returns ``colwise``, ``rowwise``, or ``colwise_gathered`` where a reader of the output needs all
    of it, by layer; copied layers and those without weights are left out. Raises `ConfigError` if
    torch has no style for a layer.
    """
    ways = {o.layer: part for o in program.computes for part in o.parts if part.label == label}
    found: dict[str, str] = {}
    for name, part in ways.items():
        readers = [ways[x.name] for x in program.layers.values() if name in x.inputs]
        inputs = [ways[x] for x in program.layers[name].inputs]
        if part.way == "copy":
            continue
        if part.way not in (*_STYLES, "feature"):
            raise ConfigError(f"layer {name!r} is split by {part.way!r}: DTensor has no style")
        needs_share = {"row", "feature"}
        gives_share = {"column", "feature"}
        gathered = part.way == "column" and not all(r.way in needs_share for r in readers)
        if part.way in needs_share and not all(i.way in gives_share for i in inputs):
            raise ConfigError(
                f"layer {name!r} is split by {part.way!r}, but its input is not: DTensor has no "
                "style for that; split the layer before it by 'column'"
            )
        if part.way == "feature" and not all(r.way in needs_share for r in readers):
            raise ConfigError(
                f"layer {name!r} is split by 'feature', but a reader needs all: split readers by "
                "'row' or 'feature'"
            )
        if gathered and any(r.way in needs_share for r in readers):
            raise ConfigError(f"layer {name!r}: some readers need a share, and others all of it")
        if program.layers[name].parameter_bytes:
            if part.way not in _STYLES:
                raise ConfigError(f"layer {name!r} has weights and is split by 'feature'")
            found[name] = _STYLES[part.way] + ("_gathered" if gathered else "")
    return found


def comm_tasks(program: Program, rank: int, itemsize: int = 4) -> tuple[CommTask, ...]:
    """The gradients that a rank reduces with others, as tasks over one flat buffer.

    They lie in the order in which backward makes them; the priority of each is the turn in which
    the rank's forward needs its weights, so that what is needed next is sent first.
    """
    computed = [
        program.named[name]
        for name in program.orders.get(rank, ())
        if isinstance(program.named[name], Operator)
    ]
    turns: dict[Tensor, int] = {}
    for operator in computed:
        for _, piece in operator.takes:
            if piece.tensor.what == "weight":
                turns.setdefault(piece.tensor, len(turns))
    tasks: list[CommTask] = []
    start = 0
    for name in program.orders.get(rank, ()):
        transfer = program.named[name]
        if isinstance(transfer, Operator) or transfer.kind == "send":
            continue
        tensor = transfer.gives[0].piece.tensor
        if tensor.what == "weight":
            stop = start + max(1, transfer.nbytes // itemsize)
            priority = turns[Tensor(tensor.layer, "weight")]
            tasks.append(
                CommTask(
                    tensor.layer, start_at=start, stop_at=stop, itemsize=itemsize, priority=priority
                )
            )
            start = stop
    return tuple(tasks)
