"""Programs for what trains: orders of pipelines, plans of DTensor, tasks of this package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from bytesched.errors import ConfigError
from bytesched.ir.program import Operator, Program, Tensor, Transfer
from bytesched.pipeline.order import Action, Kind, Order
from bytesched.task import CommTask


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
            if not isinstance(operator, Operator) or operator.phase not in kinds:
                continue
            if operator.at("dp") == replica:
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


def gradient_groups(program: Program) -> tuple[tuple[int, ...], ...]:
    """The groups of ranks that reduce gradients of weights together, in one order on all ranks."""
    return tuple(sorted({transfer.ranks for transfer in _reductions(program)}))


def _reductions(program: Program) -> Iterator[Transfer]:
    for transfer in program.transfers:
        if transfer.kind == "all_reduce" and transfer.gives[0].piece.tensor.what == "weight":
            yield transfer


def comm_tasks(program: Program, rank: int, itemsize: int = 4) -> tuple[CommTask, ...]:
    """The gradients that a rank reduces with others, as tasks over one flat buffer.

    They have the names of their layers and lie in the order in which backward makes them. The
    priority of each is the turn in which the rank's forward needs its weights, so that what is
    needed next is sent first; ``group`` counts in `gradient_groups`.
    """
    names = program.orders.get(rank, ())
    operators = [program.named[name] for name in names]
    read = (held.piece.tensor for operator in operators for held in operator.takes)
    weights = dict.fromkeys(tensor for tensor in read if tensor.what == "weight")
    turns = {tensor: turn for turn, tensor in enumerate(weights)}
    groups = gradient_groups(program)
    tasks: list[CommTask] = []
    for transfer in sorted(
        (each for each in _reductions(program) if rank in each.ranks),
        key=lambda each: names.index(each.name),
    ):
        layer = transfer.gives[0].piece.tensor.layer
        start = tasks[-1].stop_at if tasks else 0
        task = CommTask(
            layer,
            start_at=start,
            stop_at=start + -(-transfer.nbytes // itemsize),
            itemsize=itemsize,
            priority=turns[Tensor(layer, "weight")],
        )
        task.group = groups.index(transfer.ranks)
        tasks.append(task)
    return tuple(tasks)
