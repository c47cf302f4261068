"""Updates that ``step()`` leaves to whoever uses a parameter first."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
from fake_wire import FakeWire, Run, inputs, trained
from scripts_reading import PROGRAMS
from torch import Tensor, nn

import bytesched
from bytesched.errors import PluginError, SchedulerTimeout
from bytesched.plugins.planned.bundles import BundleState
from bytesched.plugins.proxies.compiling import waiting

Make = Callable[..., Any]
#: what happens in the middle of the next updates
CALLS: list[Callable[[], object]] = []


@bytesched.separable
class Inside(torch.optim.SGD):
    """Calls what a test gives it in the middle of an update."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for call in CALLS:
            call()
        super().step()


def inside(parameters: Iterable[Tensor]) -> Inside:
    return Inside(parameters, lr=0.1)


@pytest.fixture(autouse=True)
def no_calls(run_of: Make) -> Iterator[None]:
    yield
    CALLS.clear()


def states(run: Run) -> set[BundleState]:
    return {slot.bundle.state for slot in run.slots}


def test_a_use_updates_its_bundle_and_no_other(run_of: Make) -> None:
    run = run_of()
    run.model.module[0].weight.sum()
    assert run.slots[0].bundle.state is BundleState.FREE
    assert "module.0.weight" not in run.held
    assert run.held
    assert BundleState.OWED in states(run)


def test_zeroing_what_a_step_has_taken_does_not_wait(run_of: Make) -> None:
    run = run_of()
    run.optimizer.zero_grad(set_to_none=False)
    assert len(run.held) == len(run.slots)


def test_a_forward_pass_updates_as_it_comes_to_each_layer(run_of: Make) -> None:
    run = run_of()
    held: list[int] = []
    for layer in run.model.module:
        layer.register_forward_hook(lambda *_: held.append(len(run.held)))
    run.model(inputs(0))
    assert held == sorted(held, reverse=True)
    assert held[0] > held[-1] == 0


def test_what_is_owed_elsewhere_and_has_come_is_made_meanwhile(run_of: Make) -> None:
    """Nobody waits for it any more, and it is an ordinary parameter."""
    run = run_of()
    run.let(but=2)
    run.model.module[0](inputs(0))
    assert states(run) == {BundleState.FREE}
    assert run.held == []


def test_all_that_has_come_is_updated_in_one_call(run_of: Make) -> None:
    run, calls = run_of(optimizer_of=inside), list[int]()
    CALLS.append(lambda: calls.append(1))
    run.let(but=2)
    run.model.module[0](inputs(0))
    # Once while it waits for its own sum, and once with that.
    assert (len(calls), states(run)) == (2, {BundleState.FREE})


@pytest.mark.parametrize("why", ["crossing is off", "all has come", "a mode"])
def test_a_whole_step_leaves_nothing(group: None, why: str) -> None:
    run, plain = Run(FakeWire(), cross=why != "crossing is off"), Run()
    for one in (plain, run):
        one.train(2)
        one.optimizer.zero_grad()
        one.backward()
    if why == "all has come":
        run.let()
    if why == "a mode":
        with torch.overrides.BaseTorchFunctionMode():
            run.optimizer.step()
    else:
        run.optimizer.step()
    assert run.held == run.pending == []
    assert run.crossed == 0
    plain.optimizer.step()
    assert run.differences(plain) == []
    run.close()


def test_a_use_inside_an_update_is_named(run_of: Make) -> None:
    run = run_of(optimizer_of=inside)
    weights = [run.model.module[0].weight, run.model.module[3].weight]
    CALLS.append(lambda: weights[1].sum())
    with pytest.raises(PluginError, match=r"3\.weight is used on rank 0 by what runs inside"):
        weights[0].sum()
    # It is not known what was updated: that error is final.
    assert isinstance(run.session.error, PluginError)
    for weight in weights:
        with pytest.raises(PluginError, match="runs inside an update"):
            weight.sum()


def test_an_update_that_fails_stays_owed_and_ends_the_session(run_of: Make) -> None:
    run = run_of(optimizer_of=inside)

    def fail() -> None:
        raise ArithmeticError("no such number")

    CALLS.append(fail)
    weight = run.model.module[0].weight
    with pytest.raises(ArithmeticError, match="no such number"):
        weight.sum()
    assert run.slots[0].bundle.state is BundleState.OWED
    assert "module.0.weight" in run.held
    assert run.wire.notes == ["ArithmeticError: no such number"]
    assert run.wire.is_aborted
    for use in (weight.sum, lambda: run.model(inputs(0)), run.optimizer.step, run.session.flush):
        with pytest.raises(ArithmeticError, match="no such number"):
            use()


def test_another_thread_waits_for_an_update_and_not_for_ever(run_of: Make) -> None:
    run = run_of(optimizer_of=inside, timeout_s=0.2)
    began, go_on = threading.Event(), threading.Event()
    CALLS[:] = [began.set, lambda: go_on.wait(100.0)]
    weight = run.model.module[0].weight
    other = threading.Thread(target=weight.sum)
    other.start()
    try:
        assert began.wait(100.0)
        with pytest.raises(SchedulerTimeout, match=r"0\.weight has waited 0\.2 s for an update"):
            weight.sum()
    finally:
        go_on.set()
        other.join(100.0)
    assert run.session.error is None
    weight.sum()
    assert "module.0.weight" not in run.held


def test_forgotten_updates_are_not_made(run_of: Make) -> None:
    run = run_of()
    before = [slot.alias.detach().clone() for slot in run.slots]
    run.session._updates.forget()
    assert run.held == []
    assert all(map(torch.equal, before, run.model.parameters()))
    assert states(run) == {BundleState.FREE}


def test_an_array_that_was_made_of_a_weight_and_is_gone_is_no_reason_to_wait(run_of: Make) -> None:
    run = run_of()
    run.model.module[0].weight.detach().numpy()
    run.train(1)
    assert run.held


@pytest.mark.parametrize(
    "how", ["a view", "another parameter", "another process", "an array beneath"]
)
def test_what_others_read_is_updated_in_step(how: str, run_of: Make) -> None:
    """They have the memory, and not the parameter that would wait."""
    run, plain = run_of(), trained(3)
    weight: Any = run.model.module[0].weight
    seen: Any = None
    if how == "a view":
        seen = weight.detach()
    elif how == "another parameter":
        seen = nn.Parameter(torch.zeros(0))
        seen.data = weight.data
    elif how == "an array beneath":
        run.session.flush()
        array = weight.detach().numpy().copy()
        weight.data, seen = torch.from_numpy(array), torch.from_numpy(array)
    else:
        run.session.flush()
        weight.data.share_memory_()
    for one in (run, plain):
        one.train(1)
    assert run.held == []
    if how != "another process":
        assert torch.equal(seen.data, plain.model.module[0].weight.data)
    assert run.differences(plain) == []
    crossed, seen = run.crossed, None
    for one in (run, plain):
        one.train(1)
    assert (run.crossed > crossed) is (how in ("a view", "another parameter"))
    assert run.differences(plain) == []


@pytest.mark.parametrize("how", PROGRAMS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_program_that_is_made_of_the_model_has_its_weights(
    how: str, run_of: Callable[..., Run]
) -> None:
    """And updates go on crossing the barrier."""
    run, plain = run_of(optimizer_of=torch.optim.AdamW), Run(optimizer_of=torch.optim.AdamW)
    plain.train(3)
    made = PROGRAMS[how](run.model.module, inputs(9))
    assert torch.equal(made(inputs(8)), plain.model.module(inputs(8)))
    crossed = run.crossed
    for one in (run, plain):
        one.train(1)
    assert run.crossed > crossed
    assert run.differences(plain) == []


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_export_in_another_thread_is_none_of_this_one(run_of: Make) -> None:
    """Though torch says to all threads that it compiles and exports."""
    inside, over = threading.Event(), threading.Event()

    class Halting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            inside.set()
            over.wait(100)
            return x + 1

    # In DDP it would raise, plain or not (torch 2.13).
    run, plain = run_of(is_plain=True), trained(3, is_plain=True)
    weight, same = run.model.module[0].weight, plain.model.module[0].weight
    with (
        ThreadPoolExecutor(1) as pool,
        mock.patch.object(run.session._meter, "forward_begins") as begins,
    ):
        made = pool.submit(torch.export.export, Halting(), (inputs(0),), strict=False)
        try:
            assert inside.wait(100)
            assert torch.compiler.is_compiling()
            assert torch.equal(inputs(0).new_tensor(weight), same)
            crossed = run.crossed
            for one in (run, plain):
                one.train(1)
            with waiting():
                over.set()
                made.result(100)
        finally:
            over.set()
    assert not torch.compiler.is_compiling()
    assert begins.call_count == 1
    assert run.crossed > crossed
    assert run.differences(plain) == []


def test_an_optimizer_that_follows_another_has_its_own_state(run_of: Make) -> None:
    run, plain = run_of(), trained(3)
    for one in (run, plain):
        one.optimizer = torch.optim.Adam(one.model.parameters(), lr=0.01)
        if one is run:
            one.session.flush()
            gc.collect()
            one.add_optimizer(one.optimizer)
        one.train(2)
        one.optimizer.zero_grad()
        one.backward()
    run.let()
    for one in (run, plain):
        one.optimizer.step()
    assert run.differences(plain) == []
    states = [one.optimizer.state_dict()["state"] for one in (run, plain)]
    assert all(torch.equal(states[0][n]["exp_avg"], states[1][n]["exp_avg"]) for n in states[1])
