"""One training iteration as a program; data and tensor parallel, pipelines and bursts of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from bytesched.burst.cost import Place, Plan
from bytesched.burst.cost import Task as BurstTask
from bytesched.burst.graph import Chain
from bytesched.burst.graph import Layer as BurstLayer
from bytesched.errors import ConfigError
from bytesched.ir.program import Layer, Operator, Phase, Piece, Program, Share, Tensor
from bytesched.ir.transform import order, place, split
from bytesched.pipeline.order import Order

_PHASES: dict[str, tuple[Phase, ...]] = {"B": ("B",), "IW": ("I", "W")}


def training(layers: Sequence[Layer], backward: Literal["B", "IW"] = "B") -> Program:
    """One training iteration of a model.

    A backward reads the inputs of its forward and the gradient of its output, and writes gradients
    of inputs (``I`` does) and of weights (``W`` does). Each reader of an output writes one summand
    of its gradient.

    Args:
        layers: in an order in which each one follows its inputs; those that no layer reads compute
            the loss.
        backward: whether backward is one operator, or two.

    Raises `ConfigError` if layers have one name, or read what no layer before them gives.
    """
    readers: dict[str, list[str]] = {}
    for layer in layers:
        if layer.name in readers:
            raise ConfigError(f"there are two layers {layer.name!r}; names tell them apart")
        for name in layer.inputs:
            if name not in readers:
                raise ConfigError(
                    f"layer {layer.name!r} reads {name!r}, which no layer before it gives"
                )
            readers[name].append(layer.name)
        readers[layer.name] = []
    operators = [each for layer in layers for each in _operators(layer, ("F",), readers)]
    for layer in reversed(layers):
        operators += _operators(layer, _PHASES[backward], readers)
    for layer in layers:
        if layer.parameter_bytes:
            operators += _operators(layer, ("U",), readers)
    return Program({layer.name: layer for layer in layers}, tuple(operators))


def _operators(
    layer: Layer, phases: Sequence[Phase], readers: dict[str, list[str]]
) -> Iterator[Operator]:
    """Of one layer; ``readers`` are by the layer that they read."""
    weights = (Piece(Tensor(layer.name, "weight")),) if layer.parameter_bytes else ()
    weight_gradients = tuple(Piece(weight.tensor.gradient) for weight in weights)
    inputs = tuple(Piece(Tensor(name, "output")) for name in layer.inputs)
    input_gradients = tuple(
        Piece(
            Tensor(name, "output", True),
            summand=Share(readers[name].index(layer.name), len(readers[name])),
        )
        for name in layer.inputs
    )
    # The loss is the layer's own: nobody gives its gradient.
    output = Tensor(layer.name, "output")
    given = Piece(output.gradient if readers[layer.name] else output)
    reads = (*inputs, *weights)
    of_phase: dict[Phase, tuple[float, tuple[Piece, ...], tuple[Piece, ...]]] = {
        "F": (layer.forward_s, reads, (Piece(output),)),
        "B": (layer.backward_s, (*reads, given), input_gradients + weight_gradients),
        "I": (layer.backward_s / 2, (*reads, given), input_gradients),
        "W": (layer.backward_s / 2, (*reads, given), weight_gradients),
        "U": (0.0, (*weight_gradients, *weights), ()),
    }
    for phase in phases:
        workspace_bytes = 0 if phase == "U" else layer.workspace_bytes
        name = f"{layer.name}.{phase}"
        yield Operator(name, layer.name, phase, *of_phase[phase], workspace_bytes)


def data_parallel(program: Program, ways: int, label: str = "dp") -> Program:
    """Every layer split over samples."""
    for layer in program.layers:
        program = split(program, layer, "batch", ways, label)
    return program


def tensor_parallel(
    program: Program, plan: Mapping[str, str], ways: int, label: str = "tp"
) -> Program:
    """Layers split as ``plan`` says, ``column``, ``row`` or ``feature``; all others are copied."""
    for layer in plan:
        program.layer(layer)
    for layer in program.layers:
        program = split(program, layer, plan.get(layer, "copy"), ways, label)
    return program


def pipelined(
    program: Program, stages: Sequence[Sequence[str]], by: Order, copies: int = 1
) -> Program:
    """Stages on ranks, in an order; each rank of it stands for ``copies`` of data parallel.

    Args:
        program: of `training`, with the backward that the order has.
        stages: the layers of each, together all.
        by: rank r of it is the ranks ``r * copies`` and those after it.

    Raises `ConfigError` if stages and order, or stages and layers, do not fit together.
    """
    stage_of = {layer: stage for stage, layers in enumerate(stages) for layer in layers}
    listed = [layer for layers in stages for layer in layers]
    if sorted(listed) != sorted(program.layers):
        raise ConfigError(
            f"stages have the layers {', '.join(listed)}; the program has "
            f"{', '.join(program.layers)}: each of these belongs to one stage"
        )
    if len(stages) != by.stages:
        raise ConfigError(f"{len(stages)} stages, but {by.origin} has {by.stages}")
    program = data_parallel(program, copies)
    for layer in program.layers:
        program = split(program, layer, "micro", by.micro_batches, "micro")
    turns = {
        (action.stage, action.kind.value, action.micro_batch): turn
        for row in by.rows
        for turn, action in enumerate(row)
        if action is not None
    }

    def turn_of(operator: Operator) -> int:
        if operator.phase == "U":
            return len(turns)
        key = (stage_of[operator.layer], operator.phase, operator.at("micro"))
        if key not in turns:
            raise ConfigError(f"{by.origin} has no {key[0]}{key[1]}{key[2]}, for {operator.name}")
        return turns[key]

    return order(
        place(program, lambda o: by.stage_ranks[stage_of[o.layer]] * copies + o.at("dp")), turn_of
    )


def burst(task: BurstTask, plan: Plan) -> Program:
    """A plan of the burst planner: each layer on its devices, split over samples.

    Branches of one lane run one after the other, as in their order in the model; a join is a layer
    that takes no time.
    """
    layers: list[Layer] = []
    places: dict[str, Place] = {}
    _collect(task, task.graph.chain, plan, (), layers, places)
    for layer in layers:
        places.setdefault(layer.name, plan[-1].end)
    program = training(layers)
    for name, placed in places.items():
        program = split(program, name, "batch", placed.width, "dp")
    return place(program, lambda o: places[o.layer].first + o.at("dp"))


def _collect(
    task: BurstTask,
    chain: Chain,
    plan: Plan,
    inputs: tuple[str, ...],
    layers: list[Layer],
    places: dict[str, Place],
) -> tuple[str, ...]:
    """Adds the layers of a chain; returns what its end is called."""
    batch = task.graph.batch
    for item, placed in zip(chain, plan, strict=True):
        if isinstance(item, BurstLayer):
            assert isinstance(placed, Place)
            # Split into as many parts, each takes what the curve has for it.
            samples, width = batch // placed.width, placed.width
            layers.append(
                Layer(
                    item.name,
                    inputs,
                    width * item.forward.ns(samples) / 1e9,
                    width * item.backward.ns(samples) / 1e9,
                    batch * item.output_bytes,
                    item.parameter_bytes,
                )
            )
        else:
            assert not isinstance(placed, Place)
            ends = [
                _collect(task, branch, branch_plan, inputs, layers, places)
                for branch, branch_plan in zip(item.branches, placed.branches, strict=True)
            ]
            joined = tuple(dict.fromkeys(name for end in ends for name in end))
            layers.append(Layer(item.name, joined, output_bytes=batch * item.output_bytes))
        places[item.name] = placed.end
        inputs = (item.name,)
    return inputs
