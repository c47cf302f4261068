"""One planned model from its first round to its end, and what goes wrong on the way."""

from __future__ import annotations

import copy
import gc
import io
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_wire import FakeWire, Run, alone, inputs, mlp
from torch import Tensor, nn

from bytesched.errors import PeerLost, PluginError, UnusedParameterError
from bytesched.observe import Observer
from bytesched.plugins.planned.buckets import ALONE, uses
from bytesched.plugins.planned.source import Phase


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with alone():
        yield


Make = Callable[..., Any]


@pytest.fixture
def run_of() -> Iterator[Make]:
    """A run that is so many rounds old."""
    runs: list[Run] = []

    def make(rounds: int = 3, **options: Any) -> Run:
        runs.append(Run(FakeWire(), **options))
        runs[-1].train(rounds)
        return runs[-1]

    yield make
    for run in runs:
        run.close()


def trained(rounds: int, **options: Any) -> Run:
    plain = Run(**options)
    plain.train(rounds)
    return plain


# -- figures ---------------------------------------------------------------------------


def test_it_says_what_is_under_way(run_of: Make) -> None:
    run = run_of()
    assert "2 buckets under way" in repr(run.session)
    run.session.flush()
    assert "0 buckets under way" in repr(run.session)
    run.session.fail(PluginError("the first"))
    assert "the first" in repr(run.session)


def test_figures_say_what_was_wrapped_and_what_has_crossed(run_of: Make) -> None:
    run = run_of(6)
    figures = run.session.stats()
    assert (figures["model"], figures["rank"], figures["world_size"]) == ("Sequential", 0, 2)
    assert (figures["mode"], figures["order"]) == ("cross", "planned")
    assert figures["bytes_per_step"] == 1936
    assert figures["chunks"] == len(run.chunks) > 2
    assert figures["barrier_crossed_steps"] == 4
    assert figures["barrier_crossed_pct"] == 100.0


def test_what_is_sent_is_said_once(run_of: Make, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "bytesched"):
        run = run_of(5)
    [line] = [record.message for record in caplog.records if "ranks" in record.message]
    assert line.startswith("2 ranks, 6 tensors, 1.891 KiB in 7 chunks")
    assert "mode cross" in line
    assert len(run.chunks) == 7


def test_without_a_step_that_crosses_it_schedules_inside_backward(run_of: Make) -> None:
    run = run_of(4, cross=False)
    assert run.session.mode == "backward"
    assert run.held == []
    assert run.crossed == 0
    assert run.differences(trained(4)) == []


def test_observers_see_rounds(run_of: Make) -> None:
    class Tracks(Observer):
        def __init__(self) -> None:
            self.seen: set[str] = set()

        def on_span(self, track: str, *args: Any) -> None:
            self.seen.add(track)

    tracks = Tracks()
    run_of(5, observers=[tracks])
    assert tracks.seen >= {"forward", "backward", "step", "send", "wait", "update"}


# -- plans -----------------------------------------------------------------------------


def test_a_plan_comes_by_itself_and_changes_no_number(run_of: Make) -> None:
    run = run_of(8, policy="priority")
    order = run.session.planning.order
    assert sorted(order) == list(range(len(run.chunks)))
    sent = {id(chunk.sent): chunk.index for chunk in run.chunks}
    assert [sent[id(tensor)] for tensor in run.wire.started[-len(order) :]] == list(order)
    assert run.differences(trained(8)) == []


def test_gates_are_in_front_of_modules_once_they_are_known(run_of: Make) -> None:
    run = run_of(2)
    gated = [bool(module._forward_pre_hooks) for module in run.model.module]
    assert gated == [True, False, True, True]
    run.session.close()
    assert not any(module._forward_pre_hooks for module in run.model.module)


def test_evaluation_needs_ordinary_parameters(run_of: Make) -> None:
    """Fast paths look at the types of all of them at once."""
    run = run_of()
    run.let(but=2)
    run.model.eval()
    held: list[str] = []
    run.model.module[0].register_forward_hook(lambda *_: held.extend(run.held))
    with torch.no_grad():
        run.model(inputs(0))
    assert held == run.held == []


# -- errors ----------------------------------------------------------------------------


def test_an_exception_in_the_middle_of_a_round_ends_the_session(run_of: Make) -> None:
    run = run_of()
    weight = run.model.module[0].weight

    def fail(grad: Tensor) -> None:
        raise MemoryError("out of memory")

    weight.register_hook(fail)
    with pytest.raises(MemoryError, match="out of memory"):
        run.train()
    assert run.wire.notes == ["MemoryError: out of memory"]
    assert run.wire.is_aborted
    for go_on in (lambda: run.model(inputs(0)), run.optimizer.step):
        with pytest.raises(PluginError, match=r"ended the last backward\(\) on rank 0 when some"):
            go_on()
    assert run.session.unseen_error is None


def test_an_exception_between_rounds_ends_nothing(run_of: Make) -> None:
    run, plain = run_of(), trained(3)
    for one in (run, plain):
        with pytest.raises(ArithmeticError):
            _fail_beside(one)
        one.train()
    assert run.differences(plain) == []


def test_a_failure_beside_an_open_round_ends_nothing(run_of: Make) -> None:
    """Two passes may make one round together, and others come in between."""
    run, plain = run_of(make=_Halves), trained(3, make=_Halves)
    for one in (run, plain):
        one.optimizer.zero_grad()
        one.model(inputs(0))
        first, second = one.model.module.parts
        # Its buckets come first.
        second.sum().backward()
        if one is run:
            assert run.session.source.phase is Phase.OPEN
        with pytest.raises(ArithmeticError):
            _fail_beside(one)
        first.sum().backward()
        one.optimizer.step()
    assert run.differences(plain) == []


class _Halves(nn.Module):
    """Two losses that have no parameter in common."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(), mlp()

    def forward(self, input: Tensor) -> Any:
        self.parts = self.first(input), self.second(input)
        return self.parts[0] + self.parts[1]


def test_an_error_is_not_raised_where_another_model_is_trained(run_of: Make) -> None:
    run = run_of()
    run.session.fail(PluginError("the first"))
    torch.ones(2, requires_grad=True).sum().backward()
    with pytest.raises(PluginError, match="the first"):
        run.model(inputs(0))


def _fail_beside(run: Run) -> None:
    """A backward pass that has nothing to do with DDP."""
    weight = torch.ones(2, requires_grad=True)

    def fail(grad: Tensor) -> None:
        raise ArithmeticError("of the script")

    weight.register_hook(fail)
    weight.sum().backward()


class Sometimes(nn.Module):
    """A layer of it may stay out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.maybe, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.is_used = True

    def forward(self, input: Tensor) -> Any:
        return self.last(self.maybe(input) if self.is_used else input)


def test_parameters_without_a_gradient_are_named(run_of: Make) -> None:
    """Where the first bucket was handed out; else it is DDP that raises, in its own words."""
    run = run_of(make=Sometimes, bucket_bytes=100)
    run.model.module.is_used = False
    run.optimizer.zero_grad()
    run.backward()
    with pytest.raises(
        UnusedParameterError,
        match=r"2 parameters got no gradient on rank 0: module\.maybe.*find_unused_parameters=True",
    ):
        run.model(inputs(0))
    assert run.wire.is_aborted


def test_parameters_that_may_stay_out_do(run_of: Make) -> None:
    options: dict[str, Any] = {"make": Sometimes, "ddp": {"find_unused_parameters": True}}
    plain, run = Run(**options), Run(FakeWire(), **options)
    for one in (plain, run):
        for step in range(6):
            one.model.module.is_used = step % 2 == 0
            one.train()
    assert run.crossed
    assert run.differences(plain) == []
    run.close()


def test_what_cannot_be_sent_is_named(run_of: Make) -> None:
    run = run_of()

    def refuse(tensor: Tensor, key: str = "") -> Any:
        raise RuntimeError("no connection")

    run.wire.start = refuse
    with pytest.raises((PluginError, RuntimeError), match="could not be sent: no connection"):
        run.train()
    with pytest.raises(PluginError):
        run.model(inputs(0))


def test_a_lost_peer_is_raised_where_it_is_noticed_and_from_then_on(run_of: Make) -> None:
    run = run_of()
    run.wire.error = error = PeerLost("rank 1 is gone", peers=[1])
    uses: list[Callable[[], object]] = [
        run.session.flush,
        lambda: run.model(inputs(0)),
        run.model.module[0].weight.sum,
        run.model.module[3].weight.grad.sum,
        run.session.restore,
        run.session.leave,
    ]
    for use in uses:
        with pytest.raises(PeerLost, match="rank 1 is gone"):
            use()
    assert run.session.error is error
    assert run.session.unseen_error is None


def test_an_error_that_nobody_has_seen_is_kept_for_the_end(run_of: Make) -> None:
    run = run_of()
    run.session._failures.fail(error := PeerLost("rank 1 is gone", peers=[1]))
    assert run.session.unseen_error is error


# -- ends ------------------------------------------------------------------------------


@pytest.mark.parametrize("view", [False, True])
def test_restored_ddp_does_everything_by_itself(run_of: Make, view: bool) -> None:
    ddp = {"gradient_as_bucket_view": view}
    run, plain = run_of(ddp=ddp), trained(3, ddp=ddp)
    run.session.restore()
    run.session.restore()
    assert run.session.mode == "plain"
    assert run.held == run.pending == []
    before = len(run.wire.started)
    for one in (run, plain):
        one.train(3)
    assert len(run.wire.started) == before
    assert run.differences(plain) == []


def test_a_hook_of_the_script_takes_its_place(
    run_of: Make, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_of()
    seen: list[int] = []

    def theirs(state: object, bucket: Any) -> Any:
        seen.append(bucket.index())
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    theirs.__annotations__.clear()
    with caplog.at_level(logging.INFO, "bytesched"):
        run.model.register_comm_hook(None, theirs)
    assert "left to DDP from now on: the script registers a hook" in caplog.text
    run.train(2)
    assert seen
    assert run.differences(trained(5)) == []


def test_closed_it_leaves_an_ordinary_model(run_of: Make) -> None:
    run = run_of()
    run.session.flush()
    run.session.give_back()
    run.session.close()
    run.session.close()
    assert run.wire.is_closed
    assert not any(module._forward_pre_hooks for module in run.model.modules())
    assert not run.model._forward_hooks
    assert "register_comm_hook" not in vars(run.model)
    plain = trained(3)
    for one in (run, plain):
        one.train(2)
    for mine, theirs in zip(run.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_wrapped_again_it_crosses_again(run_of: Make) -> None:
    """Nothing of the session before is over the parameters' memory any more."""
    run = run_of()
    run.session.flush()
    run.session.give_back()
    run.session.close()
    assert all(uses(parameter) == ALONE for parameter in run.model.parameters())


def test_closed_after_an_error_what_was_not_updated_is_not_read(run_of: Make) -> None:
    run = run_of()
    run.session.fail(PluginError("the first"))
    run.session.close(release_parameters=False)
    with pytest.raises(PluginError, match="the first"):
        run.model.module[0].weight.sum()


def test_a_gradient_of_a_session_that_has_failed_is_not_read(run_of: Make) -> None:
    run = run_of()
    run.train()
    grad = run.model.module[0].weight.grad
    run.session.fail(PluginError("the first"))
    run.session.close()
    with pytest.raises(PluginError, match="the first"):
        grad.sum()


def test_parts_end_in_the_reverse_of_their_order_and_each_of_them(
    run_of: Make, caplog: pytest.LogCaptureFixture
) -> None:
    run, log = run_of(), list[int]()

    def refuse() -> None:
        log.append(1)
        raise RuntimeError("cannot be ended")

    run.session.give(run.ddp, lambda ddp: lambda: log.append(0))
    run.session._undo += [refuse, lambda: log.append(2)]
    with caplog.at_level(logging.ERROR, "bytesched"):
        run.session.close()
    assert log == [2, 1, 0]
    assert "could not be ended" in caplog.text
    assert run.wire.is_closed


def test_it_keeps_no_model_alive(run_of: Make) -> None:
    run = Run(FakeWire())
    run.train(3)
    run.session.flush()
    model = weakref.ref(run.model)
    session = run.session
    assert session.root is run.model
    del run.model, run.optimizer
    gc.collect()
    assert model() is None
    assert session.root is None
    run.close()


@pytest.mark.parametrize("how", ["deepcopy", "save"])
def test_a_copy_of_the_model_is_plain(run_of: Make, how: str) -> None:
    run = run_of()
    if how == "deepcopy":
        other = copy.deepcopy(run.model)
    else:
        torch.save(run.model, buffer := io.BytesIO())
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    plain = trained(3)
    for mine, theirs in zip(other.parameters(), plain.model.parameters(), strict=True):
        assert type(mine) is nn.Parameter
        assert torch.equal(mine, theirs)
    before = len(run.wire.started)
    other(inputs(0)).sum().backward()
    assert len(run.wire.started) == before


def test_a_forked_child_has_an_ordinary_model(run_of: Make) -> None:
    run = run_of()
    run.session.flush()
    run.session.disown()
    run.wire.error = AssertionError("of the parent")
    before = run.model.module[0].weight.detach().clone()
    run.model.module(inputs(0)).sum().backward()
    run.optimizer.step()
    assert not torch.equal(before, run.model.module[0].weight)
    assert run.held == run.pending == []
    assert run.session.mode == "plain"


def test_a_half_made_session_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    from bytesched.plugins.planned import session

    def refuse(watcher: object) -> Any:
        raise PluginError("no common entry")

    monkeypatch.setattr(session, "watch_passes", refuse)
    wire = FakeWire()
    with pytest.raises(PluginError, match="no common entry"):
        Run(wire)
    assert wire.is_closed


def test_wrapped_models_do_not_see_each_other(run_of: Make) -> None:
    one, other = run_of(make=mlp), run_of(make=mlp)
    other.wire.error = PeerLost("rank 1 is gone")
    with pytest.raises(PeerLost):
        other.session.flush()
    other.close()
    one.train()
    assert one.differences(trained(4)) == []
