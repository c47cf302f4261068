"""The program of one training iteration, with nothing split or placed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from bytesched.errors import ConfigError
from bytesched.ir.pieces import Piece, Share, Tensor
from bytesched.ir.program import Layer, Operator, Phase, Program

__all__ = ["training"]

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
