"""The program of one training iteration, with nothing split or placed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from bytesched.errors import ConfigError
from bytesched.ir.layers import Layer
from bytesched.ir.pieces import Piece, Share, Tensor
from bytesched.ir.program import Operator, Phase, Program

__all__ = ["training"]


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
    operators = [_forward(layer) for layer in layers]
    for layer in reversed(layers):
        operators += [_backward(layer, phase, readers) for phase in _PHASES[backward]]
    operators += [_update(layer) for layer in layers if layer.parameter_bytes]
    return Program({layer.name: layer for layer in layers}, tuple(operators))


_PHASES: dict[str, tuple[Phase, ...]] = {"B": ("B",), "IW": ("I", "W")}
#: of the seconds of a backward
_TIME_SHARE: dict[Phase, float] = {"B": 1.0, "I": 0.5, "W": 0.5}


def _output(name: str) -> Piece:
    return Piece(Tensor(name, "output"))


def _weights(layer: Layer) -> tuple[Piece, ...]:
    return (Piece(Tensor(layer.name, "weight")),) if layer.parameter_bytes else ()


def _gradients(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    return tuple(Piece(piece.tensor.gradient) for piece in pieces)


def _forward(layer: Layer) -> Operator:
    inputs = tuple(map(_output, layer.inputs))
    return Operator(
        f"{layer.name}.F",
        layer.name,
        "F",
        layer.forward_s,
        (*inputs, *_weights(layer)),
        (_output(layer.name),),
        layer.workspace_bytes,
    )


def _backward(layer: Layer, phase: Phase, readers: dict[str, list[str]]) -> Operator:
    inputs = tuple(map(_output, layer.inputs))
    own = (_output(layer.name),)
    writes: tuple[Piece, ...] = ()
    if phase in ("B", "I"):
        writes += tuple(
            Piece(
                Tensor(name, "output", True),
                summand=Share(readers[name].index(layer.name), len(readers[name])),
            )
            for name in layer.inputs
        )
    if phase in ("B", "W"):
        writes += _gradients(_weights(layer))
    return Operator(
        f"{layer.name}.{phase}",
        layer.name,
        phase,
        layer.backward_s * _TIME_SHARE[phase],
        # The loss is the layer's own: nobody gives its gradient.
        (*inputs, *_weights(layer), *(_gradients(own) if readers[layer.name] else own)),
        writes,
        layer.workspace_bytes,
    )


def _update(layer: Layer) -> Operator:
    weights = _weights(layer)
    reads = (*_gradients(weights), *weights)
    return Operator(f"{layer.name}.U", layer.name, "U", 0.0, reads, ())
