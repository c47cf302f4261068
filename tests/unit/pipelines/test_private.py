"""A torch that lacks what pipelines need is told what; one that is newer is logged once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import schedules

from bytesched.errors import PluginError
from bytesched.plugins.pipelines import private
from bytesched.plugins.pipelines.private import (
    probe_schedule,
    runtime,
    schedule_class,
    skip_self_sends,
)


@pytest.fixture(autouse=True)
def nothing_was_said() -> Iterator[None]:
    private._say_if_newer.cache_clear()
    yield
    private._say_if_newer.cache_clear()


def schedule(without: str = "", *, stages: int = 1) -> Any:
    """What has all that is read of a schedule, but for one name."""
    stage = SimpleNamespace(
        submod=None,
        stage_index=0,
        num_stages=1,
        group=None,
        perform_reduce_grad=None,
        has_backward=False,
    )
    vars(stage).pop(without, None)
    made = SimpleNamespace(
        _n_microbatches=1, _has_backward=True, step=None, _stages=[stage] * stages
    )
    vars(made).pop(without, None)
    return made


def test_what_has_everything_passes() -> None:
    probe_schedule(schedule())
    kind, action = runtime()
    assert issubclass(kind, schedules.PipelineScheduleMulti)
    assert str(action.from_str("2I1")) == "2I1"
    assert schedule_class("GPipe") is schedules.ScheduleGPipe


@pytest.mark.parametrize(
    ("without", "told"),
    [
        ("_has_backward", "SimpleNamespace of torch {} has no _has_backward, which pipelines need"),
        (
            "perform_reduce_grad",
            "a stage of SimpleNamespace of torch {} has no perform_reduce_grad",
        ),
        ("_stages", "SimpleNamespace of torch {} has no _stages, _stage, "),
    ],
)
def test_what_a_schedule_lacks(without: str, told: str) -> None:
    with pytest.raises(PluginError) as raised:
        probe_schedule(schedule(without))
    assert told.format(torch.__version__) in str(raised.value)
    assert "they were tried with torch 2.11 to 2.15" in str(raised.value)


def test_what_an_action_lacks() -> None:
    made = schedule()
    made.rank = 0
    made.pipeline_order_with_comms = {0: [SimpleNamespace(stage_index=0)]}
    with pytest.raises(PluginError, match=r"an action of SimpleNamespace of torch .* comp"):
        probe_schedule(made)


@pytest.mark.parametrize("name", ["_PipelineScheduleRuntime", "_Action"])
def test_a_torch_that_takes_no_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(schedules, name)
    with pytest.raises(PluginError, match=rf"of torch .* has no {name}, which"):
        runtime()


def test_a_schedule_that_torch_does_not_have() -> None:
    with pytest.raises(PluginError, match="has no ScheduleOfTomorrow"):
        schedule_class("OfTomorrow")


@pytest.mark.parametrize(
    ("version", "lines"), [("2.11.0", 0), ("2.15.1+cpu", 0), ("2.16.0a0+git1", 1), ("3.0.0", 1)]
)
def test_a_newer_torch_is_logged_once(
    version: str, lines: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    logger = logging.getLogger("bytesched")
    monkeypatch.setattr(logger, "propagate", True)
    for _ in range(2):
        probe_schedule(schedule())
        runtime()
    found = [record for record in caplog.records if "is newer than those" in record.message]
    assert len(found) == lines


class Greeting:
    """A stage that greets ranks 0 and 1."""

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        return [SimpleNamespace(peer=0), SimpleNamespace(peer=1)]


def test_a_stage_does_not_greet_its_own_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    stage, other = Greeting(), SimpleNamespace()
    undo = skip_self_sends([stage, other])
    assert [each.peer for each in stage._get_init_p2p_neighbors_ops()] == [0]
    assert vars(other) == {}
    undo()
    assert [each.peer for each in stage._get_init_p2p_neighbors_ops()] == [0, 1]
