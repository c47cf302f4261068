"""A wrapped model, from its first error to its end; over a Loopback."""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest
import torch
from looped import Training, weights

from bytesched.errors import PeerLost, PluginError, SchedulerTimeout
from bytesched.testing import Loopback


def session_of(training: Training) -> Any:
    assert training.session is not None
    return training.session


def test_figures_say_what_was_wrapped(ours: Training) -> None:
    figures = session_of(ours).stats()
    assert figures["model"] == "Sequential"
    assert (figures["rank"], figures["world_size"], figures["levels"]) == (0, 1, 1)
    assert (figures["mode"], figures["order"]) == (session_of(ours).mode, "loopback")


def test_closed_it_leaves_an_ordinary_model(ours: Training, plain: Training) -> None:
    session = session_of(ours)
    session.close()
    session.close()
    for _ in range(2):
        ours.train()
        plain.train()
    assert all(map(torch.equal, weights(ours.model), weights(plain.model)))
    assert not any(p._post_accumulate_grad_hooks for p in ours.model.parameters())


def test_parts_end_in_the_reverse_of_their_order_and_each_of_them(
    ours: Training, caplog: pytest.LogCaptureFixture
) -> None:
    session, log = session_of(ours), list[int]()

    def refuse() -> None:
        log.append(1)
        raise RuntimeError("cannot be ended")

    session._undo += [lambda: log.append(0), refuse, lambda: log.append(2)]
    with caplog.at_level(logging.ERROR, "bytesched"):
        session.close()
    assert log == [2, 1, 0]
    assert "could not be ended" in caplog.text
    assert not any(p._post_accumulate_grad_hooks for p in ours.model.parameters())


def test_the_first_error_is_final(ours: Training) -> None:
    session = session_of(ours)
    first, second = PluginError("the first"), SchedulerTimeout("the second")
    assert session.error is None
    session.fail(first)
    session.fail(second)
    assert session.error is first
    for call in (session.flush, session.restore, session.leave):
        with pytest.raises(PluginError, match="the first"):
            call()


def test_an_error_that_nobody_has_seen_is_kept_for_the_end(
    ours: Training, loopback: Loopback
) -> None:
    session = session_of(ours)
    loopback.hold()
    ours.backward()
    loopback.abort(error := PeerLost("rank 1 is gone", peers=[1]))
    with pytest.raises(PeerLost):
        session._progress.wait(lambda: False, "nothing")
    assert session.error is error
    assert session.unseen_error is None
    session._progress.is_error_seen = False
    assert session.unseen_error is error


def test_what_failed_because_of_an_error_is_told_as_that(ours: Training) -> None:
    session = session_of(ours)
    first = PluginError("the first")
    session.fail(first)
    with pytest.raises(PluginError, match="the first"):
        session.raise_first(PeerLost("this rank has broken its connections"))
    with pytest.raises(ValueError, match="of the script"):
        session.raise_first(ValueError("of the script"))


def test_it_does_not_keep_the_model_alive(loopback: Loopback) -> None:
    training = Training(loopback)
    session = session_of(training)
    assert session.root is training.model
    session.close()
    del training.model
    del training
    gc.collect()
    assert session.root is None
