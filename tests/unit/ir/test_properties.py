"""Whatever is split and placed: what `preserve` inserts is enough, and all of it is needed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planned_layers import LINK, MODELS, WHOLE, planned

from bytesched.errors import ConfigError
from bytesched.ir.check import CollectiveOrderError, LayoutError, check
from bytesched.ir.plans import training
from bytesched.ir.preserve import preserve
from bytesched.ir.program import Layer, Operator, Program, Transfer
from bytesched.ir.replay import CyclicPlanError
from bytesched.ir.transform import place, split

SMALL = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Layers that read any before them, split in any ways, on any ranks."""
    count = draw(st.integers(2, 5))
    layers: list[Layer] = []
    for index in range(count):
        names = [layer.name for layer in layers]
        inputs = draw(st.sets(st.sampled_from(names), min_size=1, max_size=2)) if names else set()
        layers.append(
            Layer(f"l{index}", tuple(sorted(inputs)), 1.0, 2.0, 960, draw(st.sampled_from([0, 96])))
        )
    unread = {layer.name for layer in layers} - {name for x in layers for name in x.inputs}
    layers.append(Layer("loss", tuple(sorted(unread)), 0.1, 0.1, 8, ways=WHOLE))
    program = training(layers, draw(st.sampled_from(["B", "IW"])))
    if (micro_batches := draw(st.sampled_from([1, 2]))) > 1:
        for layer in program.layers:
            program = split(program, layer, "micro", micro_batches, "micro")
    offsets: dict[str, int] = {}
    for layer, limits in program.layers.items():
        offsets[layer] = draw(st.integers(0, 2))
        for label in draw(st.sampled_from([(), ("a",), ("a", "b")])):
            way = draw(st.sampled_from(sorted(limits.ways - {"micro"})))
            program = split(program, layer, way, 2, label)
    return place(program, lambda o: offsets[o.layer] + 2 * o.at("a") + o.at("b"))


@given(programs())
@SMALL
def test_a_preserved_program_passes(program: Program) -> None:
    whole = preserve(program, LINK)
    replayed = check(whole, LINK)
    assert replayed.makespan_s >= max(
        sum(o.seconds for o in whole.computes if o.rank == rank) for rank in whole.orders
    ) * (1 - 1e-9)
    assert preserve(whole, LINK).operators == whole.operators


@given(programs(), st.data())
@SMALL
def test_nothing_that_was_inserted_can_be_left_out(program: Program, data: st.DataObject) -> None:
    whole = preserve(program, LINK)
    inserted = [o for o in whole.operators if not isinstance(o, Operator) or not o.lanes]
    if inserted:
        without = data.draw(st.sampled_from(inserted))
        left = tuple(o for o in whole.operators if o is not without)
        orders = {
            rank: tuple(name for name in names if name != without.name)
            for rank, names in whole.orders.items()
        }
        with pytest.raises(LayoutError, match="nobody writes it there"):
            check(Program(whole.layers, left, orders), LINK)


@given(programs(), st.data())
@SMALL
def test_a_collective_takes_all_that_it_gives(program: Program, data: st.DataObject) -> None:
    whole = preserve(program, LINK)
    if collectives := [each for each in whole.transfers if each.kind != "send"]:
        one = data.draw(st.sampled_from(collectives))
        less = replace(one, takes=one.takes[1:])
        operators = tuple(less if o is one else o for o in whole.operators)
        # The order of its rank may name it no longer: that is told first.
        with pytest.raises(ConfigError, match=r"takes only|0 times|expected 0"):
            check(replace(whole, operators=operators), LINK)


@pytest.mark.parametrize("form", ["dp", "pp", "tp"])
@pytest.mark.parametrize("model", sorted(MODELS))
def test_swapped_collectives_are_refused(model: str, form: str) -> None:
    program, _ = planned(model, form, 4)
    collectives = {each.name for each in program.transfers if each.kind != "send"}
    names = list(program.orders[0])
    first, second, *_ = (index for index, name in enumerate(names) if name in collectives)
    both = {*map(program.named.get, (names[first], names[second]))}
    assert len({each.ranks for each in both if isinstance(each, Transfer)}) == 1
    names[first], names[second] = names[second], names[first]
    with pytest.raises(CollectiveOrderError, match=r"rank 0 begins .* where rank \d begins"):
        check(replace(program, orders={**program.orders, 0: tuple(names)}), LINK)


def test_an_order_that_cannot_end_is_refused() -> None:
    program, _ = planned("mlp", "pp", 2)
    names = [name for name in program.orders[0] if program.named[name].lanes[0].of == "compute"]
    back = (*names[::-1], *(name for name in program.orders[0] if name not in names))
    with pytest.raises(CyclicPlanError, match="waits for"):
        check(replace(program, orders={**program.orders, 0: back}), LINK)
