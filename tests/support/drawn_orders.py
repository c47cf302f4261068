"""Orders for properties to hold for."""

from __future__ import annotations

from hypothesis import strategies as st

from bytesched.pipeline.order import Action, Kind, Order
from bytesched.pipeline.stages import Link, Pipeline, Stage

__all__ = ["orders", "plans"]


@st.composite
def orders(draw: st.DrawFn) -> Order:
    """Any that ranks can follow: actions drawn one by one among those that may be next."""
    ranks = draw(st.integers(1, 3))
    stage_ranks = [*range(ranks), *draw(st.lists(st.integers(0, ranks - 1), max_size=3))]
    micro_batches = draw(st.integers(1, 3))
    waiting: dict[Action, set[Action]] = {}
    last = len(stage_ranks) - 1
    for micro_batch in range(micro_batches):
        split = draw(st.lists(st.booleans(), min_size=last + 1, max_size=last + 1))
        for stage in range(last + 1):
            forward = Action(stage, Kind.FORWARD, micro_batch)
            waiting[forward] = {Action(stage - 1, Kind.FORWARD, micro_batch)} if stage else set()
            backward = Action(stage, _backward(split[stage]), micro_batch)
            waiting[backward] = {forward}
            if stage < last:
                waiting[backward].add(Action(stage + 1, _backward(split[stage + 1]), micro_batch))
            if split[stage]:
                waiting[Action(stage, Kind.WEIGHT_GRADIENT, micro_batch)] = {backward}
    rows: list[list[Action | None]] = [[] for _ in range(ranks)]
    over: set[Action] = set()
    while waiting:
        action = draw(st.sampled_from([each for each in waiting if waiting[each] <= over]))
        over.add(action)
        del waiting[action]
        row = rows[stage_ranks[action.stage]]
        row.extend([None] * draw(st.integers(0, 1)))
        row.append(action)
    return Order(tuple(map(tuple, rows)))


@st.composite
def plans(draw: st.DrawFn) -> tuple[Order, Pipeline]:
    """An order, and stages that take whole seconds."""
    order = draw(orders())
    seconds = st.integers(0, 3).map(float)
    stages = tuple(
        Stage(
            draw(seconds),
            draw(seconds),
            draw(seconds),
            draw(st.integers(0, 5)),
            draw(st.integers(0, 4)),
            draw(st.integers(0, 4)),
        )
        for _ in order.stage_ranks
    )
    link = Link(2.0, float(draw(st.integers(0, 2))))
    return order, Pipeline(stages, order.stage_ranks, link, draw(st.integers(1, 3)))


def _backward(split: bool) -> Kind:
    return Kind.INPUT_GRADIENT if split else Kind.BACKWARD
