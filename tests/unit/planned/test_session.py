"""One planned model from its first round to its end, and what goes wrong on the way."""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_wire import FakeWire, Run, inputs, mlp, trained
from torch import Tensor, nn

from bytesched.errors import PeerLost, PluginError, UnusedParameterError
from bytesched.plugins.planned.buckets import ALONE, uses
from bytesched.plugins.planned.source import Phase

Make = Callable[..., Any]


# -- figures ---------------------------------------------------------------------------


def test_figures_say_what_was_wrapped_and_what_has_crossed(run_of: Make) -> None:
    run = run_of(6)
    figures = run.session.stats()
    assert (figures["model"], figures["rank"], figures["world_size"]) == ("Sequential", 0, 2)
    assert (figures["mode"], figures["order"]) == ("cross", "planned")
    assert figures["bytes_per_step"] == 1936
    assert figures["chunks"] == len(run.chunks) > 2
    assert figures["barrier_crossed_steps"] == 4
    assert figures["barrier_crossed_pct"] == 100.0


@pytest.mark.parametrize(
    ("fields", "says"),
    [({"guard": False}, False), ({"is_plain": True}, True), ({"compression": "fp16"}, True)],
)
def test_what_is_sent_is_said_once(
    run_of: Make, caplog: pytest.LogCaptureFixture, fields: dict[str, Any], says: bool
) -> None:
    """And where it is never compared with plain DDP, though nobody has said so."""
    with caplog.at_level(logging.INFO, "bytesched"):
        run = run_of(5, **fields)
    [line] = [line for line in caplog.messages if "ranks" in line]
    size = "0.9453 KiB" if "compression" in fields else "1.891 KiB"
    assert line.startswith(f"2 ranks, 6 tensors, {size} in {len(run.chunks)} chunks")
    assert "mode cross" in line
    assert ("never compared" in line) == says


def test_time_on_the_wire_is_that_of_rounds_which_go_as_now(run_of: Make) -> None:
    session = run_of(6).session
    session._round_busy_ns = 5
    assert session._busy_ns() == 5 * session._meter.rounds > 0
    session._measure_anew()
    assert session._busy_ns() == 0


# -- plans -----------------------------------------------------------------------------


def test_a_plan_comes_by_itself_and_changes_no_number(run_of: Make) -> None:
    run = run_of(8, policy="priority")
    order = run.session.planning.order
    assert sorted(order) == list(range(len(run.chunks)))
    sent = {id(chunk.sent): chunk.index for chunk in run.chunks}
    assert [sent[id(tensor)] for tensor in run.wire.started[-len(order) :]] == list(order)
    assert run.differences(trained(8)) == []


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


def _fail(grad: Tensor) -> None:
    raise MemoryError("out of memory")


def test_an_exception_in_the_middle_of_a_round_ends_the_session(run_of: Make) -> None:
    run = run_of()
    weight = run.model.module[0].weight
    weight.register_hook(_fail)
    with pytest.raises(MemoryError, match="out of memory"):
        run.train()
    assert run.wire.notes == ["MemoryError: out of memory"]
    assert run.wire.is_aborted
    # What was taken was applied before.
    run.session.flush()
    for go_on in (lambda: run.model(inputs(0)), run.optimizer.step):
        with pytest.raises(PluginError, match=r"ended the last backward\(\) on rank 0 when some"):
            go_on()
    assert run.session.unseen_error is None


def test_an_error_in_the_place_of_another_one_has_been_seen(run_of: Make) -> None:
    """A thread has found it while backward goes on, which something else ends then."""
    run = run_of()

    def fail(grad: Tensor) -> None:
        run.session._failures.fail(PluginError("the first"))
        _fail(grad)

    run.model.module[0].weight.register_hook(fail)
    with pytest.raises(PluginError, match="the first"):
        run.train()
    assert run.session.unseen_error is None


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
        beside = torch.ones(2, requires_grad=True)
        beside.register_hook(_fail)
        with pytest.raises(MemoryError):
            beside.sum().backward()
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


# -- ends ------------------------------------------------------------------------------


def _theirs(seen: list[int], bucket: Any) -> Any:
    seen.append(bucket.index())
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


# DDP does not know them as they are written.
_theirs.__annotations__.clear()


def test_a_hook_of_the_script_takes_its_place(
    run_of: Make, caplog: pytest.LogCaptureFixture
) -> None:
    run, seen = run_of(), list[int]()
    with caplog.at_level(logging.INFO, "bytesched"):
        run.model.register_comm_hook(seen, _theirs)
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
    # So that it crosses again where it is wrapped again.
    assert all(uses(parameter) == ALONE for parameter in run.model.parameters())
    plain = trained(3)
    for one in (run, plain):
        one.train(2)
    for mine, theirs in zip(run.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_closed_after_an_error_what_has_not_come_is_not_read(run_of: Make) -> None:
    run = run_of()
    weight = run.model.module[0].weight
    grad = weight.grad
    run.session.fail(PluginError("the first"))
    run.session.close(release_parameters=False)
    for tensor in (weight, grad):
        with pytest.raises(PluginError, match="the first"):
            tensor.sum()


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
    assert run.chunks == []


@pytest.mark.parametrize("how", ["deepcopy", "save"])
def test_a_copy_of_the_model_is_plain_and_takes_a_hook(run_of: Make, how: str) -> None:
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
    before, seen = len(run.wire.started), list[int]()
    other.register_comm_hook(seen, _theirs)
    other(inputs(0)).sum().backward()
    assert seen
    assert len(run.wire.started) == before
    assert run.session.mode == "cross"


def test_a_half_made_session_is_closed(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from bytesched.plugins.planned import session

    def refuse(watcher: object) -> Any:
        raise PluginError("no common entry")

    monkeypatch.setattr(session, "watch_passes", refuse)
    wire = FakeWire()
    with pytest.raises(PluginError, match="no common entry"):
        Run(wire)
    assert wire.is_closed
