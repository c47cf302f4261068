"""Plans by name, what they come to on paper, and what they are lowered to."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from paths import ROOT
from planned_layers import (
    LINK,
    MLP_TENSOR,
    MODELS,
    ONE_F_ONE_B,
    TRANSFORMER_TENSOR,
    V_SPLIT,
    WHOLE,
    mlp,
    planned,
    stages_of,
)

from bytesched.burst.cost import Cluster, Place, Task
from bytesched.burst.cost import schedule as burst_schedule
from bytesched.burst.graph import load_graph, shipped_graphs
from bytesched.burst.search import fastest_plan
from bytesched.errors import ConfigError
from bytesched.ir.check import MemoryLimitError, check
from bytesched.ir.lower import comm_tasks, gradient_groups, pipeline_order, tensor_plan
from bytesched.ir.plans import burst, data_parallel, pipelined, tensor_parallel, training
from bytesched.ir.preserve import preserve
from bytesched.ir.program import Layer
from bytesched.ir.replay import Link
from bytesched.ir.transform import grid, order, place, split
from bytesched.pipeline.order import Order


def kinds(model: str, form: str, ranks: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for transfer in planned(model, form, ranks)[0].transfers:
        found[transfer.kind] = found.get(transfer.kind, 0) + 1
    return found


# -- time and memory -------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_time_of_data_parallel_is_the_formula(ranks: int) -> None:
    """Compute, then what is left of rings one after the other, each beside backward."""
    layers = [Layer(f"l{i}", (f"l{i - 1}",) if i else (), 1.0, 2.0, 8, 1200) for i in range(4)]
    layers.append(Layer("loss", ("l3",), ways=WHOLE))
    program = data_parallel(training(layers), ranks)
    program = preserve(place(program, grid(program, ["dp"])), link := Link(1000.0, 0.01))
    ring_s = 2 * (ranks - 1) * 0.01 + 2 * (ranks - 1) / ranks * 1.2
    free_s = 0.0
    for done in range(4):
        free_s = max(free_s, (4 * 1.0 + 2.0 * (done + 1)) / ranks) + ring_s
    assert check(program, link).makespan_s == pytest.approx(free_s if ranks > 1 else 12.0)


def test_a_pipeline_takes_the_time_of_its_slots() -> None:
    layers = [Layer("0", (), 4.0, 8.0), Layer("1", ("0",), 4.0, 8.0), Layer("loss", ("1",))]
    layers[-1] = replace(layers[-1], ways=WHOLE)
    stages = [["0"], ["1", "loss"]]
    program = pipelined(training(layers), stages, Order.parse(ONE_F_ONE_B))
    # 1F1B: (micro-batches + stages - 1) forwards and backwards.
    assert check(preserve(program, Link(1e9)), Link(1e9)).makespan_s == pytest.approx(5 * 3.0)


def test_memory_of_a_pipeline_is_what_its_order_keeps() -> None:
    """1F1B keeps as many micro-batches as there are stages behind, GPipe all of them."""
    layers = [
        Layer("0", (), 1.0, 2.0, 400),
        Layer("1", ("0",), 1.0, 2.0, 4000),
        Layer("2", ("1",), 1.0, 2.0, 4),
        Layer("loss", ("2",), ways=WHOLE),
    ]
    stages = [["0", "1"], ["2", "loss"]]
    g_pipe = "0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n1F0,1F1,1F2,1F3,1B0,1B1,1B2,1B3\n"
    link = Link(1e9)
    peaks = []
    for text in (ONE_F_ONE_B, g_pipe):
        program = preserve(pipelined(training(layers), stages, Order.parse(text)), link)
        peaks.append(check(program, link).peaks[1].nbytes)
        with pytest.raises(MemoryLimitError, match=f"rank 1 needs {peaks[-1]} bytes at "):
            check(program, link, {1: peaks[-1] - 1})
        check(program, link, {1: peaks[-1], 7: 0})
    assert peaks[1] - peaks[0] >= 2 * 1000


def test_a_rank_remembers_weights_activations_gradients_and_workspace() -> None:
    layers = [Layer("0", (), 1.0, 1.0, 100, 10, 7), Layer("loss", ("0",), 1.0, 1.0, 1, ways=WHOLE)]
    program = preserve(place(training(layers), lambda _: 0), LINK)
    peak = check(program, LINK).peaks[0]
    # In the loss's backward: weights, the output, its gradient, the loss.
    assert (peak.nbytes, peak.operator, peak.at_s) == (10 + 100 + 100 + 1, "loss.B", 2.0)


@pytest.mark.parametrize("name", shipped_graphs())
def test_plans_of_the_burst_planner_pass(name: str) -> None:
    graph = load_graph([name], batch=8)
    cluster = Cluster(4, 1e9, 1e-5)
    found = fastest_plan(Task(graph, cluster, 2.0))
    task = Task(graph, cluster, 2.0)
    link = Link(cluster.bytes_per_s, cluster.latency_s)
    program = preserve(burst(task, found.plan), link)
    busy_s = sum(operator.seconds for operator in program.computes)
    spans = [s for s in found.schedule.spans if s.kind != "move"]
    assert busy_s == pytest.approx(sum(s.end_ns - s.start_ns for s in spans) / 1e9)
    assert check(program, link).makespan_s >= max(
        sum(o.seconds for o in program.computes if o.rank == rank) for rank in program.orders
    )


def test_a_burst_on_all_devices_takes_the_time_that_its_planner_says() -> None:
    graph = load_graph(["vgg16"], batch=8)
    # Rings without latency, as in the planner's model.
    task = Task(graph, Cluster(4, 1e9, 0.0), 100.0)
    plan = (Place(0, 4),) * len(graph.chain)
    program = preserve(burst(task, plan), Link(1e9))
    expected_s = burst_schedule(task, plan).time_ns / 1e9
    assert check(program, Link(1e9)).makespan_s == pytest.approx(expected_s, rel=1e-6)


# -- what joins ------------------------------------------------------------------------


def test_collectives_are_those_that_are_known() -> None:
    """One all-reduce for each layer with weights; in tensor parallel also two for each pair."""
    assert kinds("mlp", "dp", 4) == {"all_reduce": 8}
    # Forward of each down; gradients of the input of each up but the first, which reads data.
    assert kinds("mlp", "tp", 2) == {"all_reduce": 4 + 3}
    # Four micro-batches forward and backward, in each of two replicas.
    assert kinds("mlp", "pp", 4) == {"send": 16, "all_reduce": 8}


def test_rows_between_column_and_row_scatter_and_gather() -> None:
    """Sequence parallelism: what is computed of whole rows is split by rows between."""
    layers = [
        Layer("norm", (), output_bytes=8),
        Layer("up", ("norm",), output_bytes=8, parameter_bytes=8),
        Layer("down", ("up",), output_bytes=8, parameter_bytes=8),
        Layer("loss", ("down",), ways=WHOLE),
    ]
    program = training(layers)
    ways = {"norm": "batch", "up": "column", "down": "row", "loss": "batch"}
    for layer, way in ways.items():
        program = split(program, layer, way, 2, "tp")
    program = preserve(place(program, grid(program, ["tp"])), LINK)
    check(program, LINK)
    found = [(each.kind, str(each.gives[0].piece)) for each in program.transfers]
    assert sorted(found) == [
        ("all_gather", "down.grad"),
        ("all_gather", "norm"),
        ("reduce_scatter", "down[rows 0/2]"),
        ("reduce_scatter", "norm.grad[rows 0/2]"),
    ]


# -- lowering --------------------------------------------------------------------------


@pytest.mark.parametrize("text", [ONE_F_ONE_B, V_SPLIT])
@pytest.mark.parametrize("copies", [1, 2])
def test_an_order_comes_back(text: str, copies: int, tmp_path: Path) -> None:
    by = Order.parse(text)
    layers, _ = MODELS["transformer"]
    stages = stages_of(layers, by.stages)
    program = training(layers, "IW" if by.splits_backward else "B")
    program = preserve(pipelined(program, stages, by, copies), LINK)
    for replica in range(copies):
        lowered = pipeline_order(program, stages, replica)
        lowered.write(tmp_path / "order.csv")
        rows = Order.read(tmp_path / "order.csv").rows
        assert rows == tuple(tuple(filter(None, row)) for row in by.rows)


@pytest.mark.parametrize(
    ("model", "ways"), [("mlp", MLP_TENSOR), ("transformer", TRANSFORMER_TENSOR)]
)
def test_styles_are_torchs(model: str, ways: dict[str, str]) -> None:
    styles = {"column": "colwise", "row": "rowwise"}
    program, _ = planned(model, "tp", 4)
    assert tensor_plan(program) == {
        layer: styles[way] for layer, way in ways.items() if way in styles
    }


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"0.act": "feature"}, "'0.act' is split by 'feature', but its input is not"),
        ({"0.down": "row"}, "'0.down' is split by 'row', but its input is not"),
        ({"0.up": "column", "0.act": "feature"}, "'0.act' is split by 'feature', but a reader"),
        ({"0.up": "batch"}, "'0.up' is split by 'batch': DTensor has no style"),
    ],
)
def test_what_torch_has_no_style_for_is_named(plan: dict[str, str], message: str) -> None:
    program = tensor_parallel(training(mlp()), plan, 2)
    with pytest.raises(ConfigError, match=message):
        tensor_plan(program)
    check(preserve(place(program, grid(program, ["tp"])), LINK), LINK)


def test_a_column_whose_reader_needs_all_is_gathered() -> None:
    program = tensor_parallel(training(mlp()), {"0.up": "column"}, 2)
    assert tensor_plan(program) == {"0.up": "colwise_gathered"}


def test_tasks_are_gradients_by_next_use() -> None:
    program, _ = planned("mlp", "tp", 4)
    tasks = comm_tasks(program, 3, itemsize=8)
    assert gradient_groups(program) == ((0, 2), (1, 3))
    assert {task.group for task in tasks} == {1}
    weights = [layer.name for layer in mlp() if layer.parameter_bytes]
    assert [task.name for task in tasks] == weights[::-1]
    assert [task.name for task in sorted(tasks, key=lambda task: task.priority)] == weights
    assert [task.start_at for task in tasks[1:]] == [task.stop_at for task in tasks[:-1]]
    layers = {layer.name: layer for layer in mlp()}
    assert all(2 * task.nbytes == layers[task.name].parameter_bytes for task in tasks)


# -- what cannot be planned ------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "way", "ways", "message"),
    [
        ("9.up", "batch", 2, "no layer '9.up'"),
        ("0.up", "columns", 2, "did you mean column"),
        ("0.up", "batch", 0, "0 parts"),
        ("0.act", "column", 2, "cannot be split by 'column', but by batch, copy, feature, micro"),
    ],
)
def test_a_split_that_cannot_be_is_named(layer: str, way: str, ways: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split(training(mlp()), layer, way, ways, "x")


def test_layers_that_do_not_fit_are_named() -> None:
    with pytest.raises(ConfigError, match="two layers 'a'"):
        training([Layer("a"), Layer("a")])
    with pytest.raises(ConfigError, match="'b' reads 'a', which no layer before it gives"):
        training([Layer("b", ("a",)), Layer("a")])
    program = training([Layer("a"), Layer("b", ("a",))])
    with pytest.raises(ConfigError, match="computes the loss"):
        split(program, "b", "column", 2, "x")
    with pytest.raises(ConfigError, match="a split 'x' already"):
        split(split(program, "a", "batch", 2, "x"), "a", "batch", 2, "x")
    with pytest.raises(ConfigError, match="split first"):
        split(place(program, lambda _: 0), "a", "batch", 2, "x")
    with pytest.raises(ConfigError, match="has no rank"):
        preserve(program, LINK)
    with pytest.raises(ConfigError, match="rank -1; ranks are numbered from 0"):
        place(program, lambda _: -1)
    with pytest.raises(ConfigError, match="no layer has a split 'dp'"):
        grid(program, ["dp"])
    with pytest.raises(ConfigError, match="each of these belongs to one stage"):
        pipelined(program, [["a"]], Order.parse(ONE_F_ONE_B))
    with pytest.raises(ConfigError, match="1 stages, but order has 2"):
        pipelined(program, [["a", "b"]], Order.parse(ONE_F_ONE_B))
    with pytest.raises(ConfigError, match="order has no 1B0, for "):
        pipelined(program, [["a"], ["b"], [], []], Order.parse(V_SPLIT))


def test_an_order_that_forgets_an_operator_is_refused() -> None:
    program, _ = planned("mlp", "dp", 2)
    orders = {**program.orders, 1: program.orders[1][1:]}
    with pytest.raises(ConfigError, match=r"rank 1 has '.*' 0 times, expected 1 times"):
        check(replace(program, orders=orders), LINK)


def test_ranks_that_leave_a_stage_half_done_have_no_order() -> None:
    layers, _ = MODELS["mlp"]
    by = Order.parse(ONE_F_ONE_B)
    program = pipelined(training(layers), stages := stages_of(layers, 2), by)
    program = order(program, lambda o: "FBU".index(o.phase))
    check(preserve(program, LINK), LINK)
    with pytest.raises(ConfigError, match=r"the plan, row 1, cell .* is there again"):
        pipeline_order(program, stages)


def test_the_example_prints_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "explanation" / "plans.md").read_text()
    [(code, printed)] = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", page, re.DOTALL)
    exec(compile(code, "plans.md", "exec"), {})
    assert capsys.readouterr().out == printed
