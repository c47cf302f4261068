"""What the carrier of a sharded update begins and ends, and in which order."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock, call

import pytest

from bytesched.errors import PeerLost, PluginError
from bytesched.plugins.c10d.sharded_carrier import ShardedCarrier

ENDS = ("answers.end_round", "parameters.close", "exchange.close", "answers.close", "closed")


class Parts:
    """What a carrier is made of, with one log of their calls."""

    def __init__(self) -> None:
        self.log = MagicMock()
        self.log.exchange.lost.return_value = None
        self.log.answers.lost.return_value = None
        self.log.requests.lost.return_value = None
        self.groups: list[Any] = ["sums", "answers"]

    def sharded(self) -> ShardedCarrier:
        log = self.log
        return ShardedCarrier(
            log.exchange,
            log.parameters,
            log.answers,
            log.requests,
            log.queries,
            self.groups,
            failed=log.failed,
            closed=log.closed,
        )

    def calls(self, *names: str) -> list[str]:
        """Those of these names, in their order."""
        return [name for name, _, _ in self.log.mock_calls if name in names]


@pytest.fixture
def parts() -> Parts:
    return Parts()


def test_a_round_that_cannot_begin_fails_for_all_ranks(parts: Parts) -> None:
    carrier = parts.sharded()
    error = PluginError("the last round is still under way")
    parts.log.exchange.begin_round.side_effect = error
    with pytest.raises(PluginError) as raised:
        carrier.begin_round()
    assert raised.value is error
    assert parts.log.failed.mock_calls == [call(error)]
    assert not parts.calls("queries.begin_round", "parameters.begin_round")


def test_a_round_begins_with_sums_before_norms_and_parameters(parts: Parts) -> None:
    parts.sharded().begin_round()
    names = ["exchange.begin_round", "queries.begin_round", "parameters.begin_round"]
    assert parts.calls(*names) == names


@pytest.mark.parametrize("of", ["exchange", "answers", "requests"])
def test_whatever_is_lost_is_lost_for_the_carrier(parts: Parts, of: str) -> None:
    carrier = parts.sharded()
    assert carrier.lost() is None
    error = PeerLost("rank 1 is gone")
    getattr(parts.log, of).lost.return_value = error
    assert carrier.lost() is error


@pytest.mark.parametrize("is_lost", [False, True])
def test_it_ends_once_and_gives_each_group_back_at_last(parts: Parts, is_lost: bool) -> None:
    """Its last answers come first, as other ranks wait for them; after an error none does."""
    if is_lost:
        parts.log.answers.end_round.side_effect = PeerLost("rank 1 is gone")
    carrier = parts.sharded()
    carrier.close()
    carrier.close()
    assert parts.calls(*ENDS) == [*ENDS, "closed"]
    assert parts.log.closed.mock_calls == [call(group) for group in parts.groups]


@pytest.mark.parametrize("is_idle", [False, True])
def test_sums_end_gently_only_where_no_parameter_is_under_way(parts: Parts, is_idle: bool) -> None:
    parts.log.parameters.is_idle = is_idle
    parts.sharded().close()
    assert parts.log.exchange.close.mock_calls == [call(is_idle=is_idle)]
