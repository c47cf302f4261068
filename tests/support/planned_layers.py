"""Two models, and the layers that plans are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from bytesched.ir.plans import data_parallel, pipelined, tensor_parallel, training
from bytesched.ir.preserve import preserve
from bytesched.ir.program import Layer, Program
from bytesched.ir.replay import Link
from bytesched.ir.transform import grid, place
from bytesched.pipeline.order import Order

LINK = Link(bytes_per_s=1e9, latency_s=1e-6)
WIDTH, BLOCKS = 8, 4
BLOCK = ("norm", "q", "k", "v", "heads", "out", "add", "norm_2", "up", "act", "down", "add_2")
#: computed of whole rows
WHOLE = frozenset({"batch", "micro", "copy"})
#: computed by itself of each feature, or head
EACH = frozenset({"batch", "micro", "feature", "copy"})


def mlp() -> list[Layer]:
    layers: list[Layer] = []
    inputs: tuple[str, ...] = ()
    for block in range(BLOCKS):
        up, act, down = (f"{block}.{name}" for name in ("up", "act", "down"))
        layers += [
            Layer(up, inputs, 1e-3, 2e-3, 16 * 2 * WIDTH * 8, 2 * WIDTH * (WIDTH + 1) * 8),
            Layer(act, (up,), 1e-4, 1e-4, 16 * 2 * WIDTH * 8, ways=EACH),
            Layer(down, (act,), 1e-3, 2e-3, 16 * WIDTH * 8, WIDTH * (2 * WIDTH + 1) * 8),
        ]
        inputs = (down,)
    return [*layers, Layer("loss", inputs, 1e-4, 1e-4, 8, ways=WHOLE)]


MLP_TENSOR = {
    f"{block}.{name}": way
    for block in range(BLOCKS)
    for name, way in (("up", "column"), ("act", "feature"), ("down", "row"))
}


def transformer() -> list[Layer]:
    rows = 16 * 4 * WIDTH * 8
    layers: list[Layer] = [Layer("0", (), 1e-3, 2e-3, rows, 12 * WIDTH * 8, ways=WHOLE)]
    stream = "0"
    for block in range(1, BLOCKS - 1):
        norm, query, key, value, heads, out, add, norm_2, up, act, down, add_2 = (
            f"{block}.{name}" for name in BLOCK
        )
        square = (WIDTH + 1) * WIDTH * 8
        layers += [
            Layer(norm, (stream,), 1e-4, 2e-4, rows, 2 * WIDTH * 8, ways=WHOLE),
            *(Layer(each, (norm,), 1e-3, 2e-3, rows, square) for each in (query, key, value)),
            Layer(heads, (query, key, value), 1e-3, 2e-3, rows, ways=EACH),
            Layer(out, (heads,), 1e-3, 2e-3, rows, square),
            Layer(add, (stream, out), 1e-5, 1e-5, rows, ways=WHOLE),
            Layer(norm_2, (add,), 1e-4, 2e-4, rows, 2 * WIDTH * 8, ways=WHOLE),
            Layer(up, (norm_2,), 1e-3, 2e-3, 2 * rows, 2 * square),
            Layer(act, (up,), 1e-4, 2e-4, 2 * rows, ways=EACH),
            Layer(down, (act,), 1e-3, 2e-3, rows, 2 * square),
            Layer(add_2, (add, down), 1e-5, 1e-5, rows, ways=WHOLE),
        ]
        stream = add_2
    return [
        *layers,
        Layer(f"{BLOCKS - 1}", (stream,), 1e-3, 2e-3, rows, WIDTH * 12 * 8, ways=WHOLE),
        Layer("loss", (f"{BLOCKS - 1}",), 1e-4, 1e-4, 8, ways=WHOLE),
    ]


TRANSFORMER_TENSOR = {
    f"{block}.{name}": way
    for block in range(1, BLOCKS - 1)
    for name, way in {
        **dict.fromkeys(("q", "k", "v", "up"), "column"),
        **dict.fromkeys(("heads", "act"), "feature"),
        **dict.fromkeys(("out", "down"), "row"),
    }.items()
}

MODELS = {"mlp": (mlp(), MLP_TENSOR), "transformer": (transformer(), TRANSFORMER_TENSOR)}
ONE_F_ONE_B = "0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3\n,1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n"
#: stages 0 and 3 on one rank, weight gradients apart
V_SPLIT = (
    "0F0,0F1,3F0,3I0,3W0,0I0,3F1,3I1,0W0,3W1,0I1,0W1\n"
    "1F0,2F0,1F1,2F1,2I0,1I0,2W0,2I1,1W0,1I1,2W1,1W1\n"
)


def stages_of(layers: Sequence[Layer], stages: int) -> list[list[str]]:
    """The children of a model of `BLOCKS` in a row, as many to each stage; the loss to the last."""
    found: list[list[str]] = [[] for _ in range(stages)]
    for layer in layers:
        child = layer.name.partition(".")[0]
        found[int(child) * stages // BLOCKS if child.isdigit() else -1].append(layer.name)
    return found


def planned(model: str, form: str, ranks: int) -> tuple[Program, list[list[str]]]:
    """The program of a model on so many ranks, and its stages, of any."""
    layers, tensor = MODELS[model]
    stages: list[list[str]] = []
    if form == "dp":
        program = data_parallel(training(layers), ranks)
        program = place(program, grid(program, ["dp"]))
    elif form == "tp":
        program = tensor_parallel(data_parallel(training(layers), ranks // 2), tensor, 2)
        program = place(program, grid(program, ["dp", "tp"]))
    else:
        text = {"pp": ONE_F_ONE_B, "pp V": V_SPLIT}[form]
        order = Order.parse(text)
        stages = stages_of(layers, order.stages)
        backward: Literal["B", "IW"] = "IW" if order.splits_backward else "B"
        program = pipelined(training(layers, backward), stages, order, ranks // 2)
    return preserve(program, LINK), stages
