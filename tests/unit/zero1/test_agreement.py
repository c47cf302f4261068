"""What ranks say before they do something together, over threads that stand for ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from bytesched.errors import MismatchError, PeerLost, PluginError
from bytesched.plugins.failures import Failures
from bytesched.plugins.zero1.agreement import Agreement, Kind

TIMEOUT_S = 20


class Work:
    """Ends where it is waited for, when all ranks do."""

    def __init__(self, end: Callable[[], None]) -> None:
        self.end = end


class Ranks:
    """What the groups of all ranks share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=TIMEOUT_S)
        self.given: dict[int, Any] = {}


class FakeGroup:
    """A group of one rank."""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.ranks = ranks
        self.rank = rank
        self.size = ranks.size

    def _meet(self, given: Any, take: Callable[[dict[int, Any]], object]) -> Work:
        def end() -> None:
            self.ranks.given[self.rank] = given
            self.ranks.barrier.wait()
            take(dict(self.ranks.given))
            self.ranks.barrier.wait()

        return Work(end)

    def all_gather(self, row: Tensor, part: Tensor) -> Work:
        return self._meet(
            part, lambda given: row.copy_(torch.cat([given[r] for r in range(self.size)]))
        )

    def all_to_all(
        self, into: Tensor, sent: Tensor, into_sizes: Sequence[int], sent_sizes: Sequence[int]
    ) -> Work:
        def take(given: dict[int, Any]) -> None:
            into.copy_(torch.cat([given[r][self.rank] for r in range(self.size)]))

        return self._meet(sent.split(list(sent_sizes)), take)

    def wait(self, work: Work, task: str) -> None:
        work.end()


class Peers:
    def leave_note(self, text: str) -> None:
        pass

    def abort(self) -> None:
        pass


def run(*scripts: Callable[[Agreement], Any]) -> list[Any]:
    """What each rank's script returns or raises."""
    ranks = Ranks(len(scripts))
    found: list[Any] = [None] * len(scripts)

    def one(rank: int) -> None:
        group = cast(Any, FakeGroup(ranks, rank))
        agreement = Agreement(group, Failures(Peers()), lambda n: f"{rank}:{n}".encode())
        try:
            found[rank] = scripts[rank](agreement)
        except Exception as error:  # noqa: BLE001 - it is what is looked at
            found[rank] = error

    threads = [threading.Thread(target=one, args=[rank]) for rank in range(len(scripts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    return found


def test_all_say_the_same_and_go_on() -> None:
    def script(agreement: Agreement) -> str:
        for step in range(3):
            agreement.rounds += 1
            agreement.steps += 1
            agreement.say(Kind.STEP, step)
        return "done" if agreement.end() else "gone"

    assert run(script, script, script) == ["done"] * 3


def test_what_differs_is_raised_on_every_rank() -> None:
    def takes(agreement: Agreement) -> None:
        agreement.steps += 1
        agreement.say(Kind.STEP, 1)

    def skips(agreement: Agreement) -> None:
        agreement.say(Kind.FORWARD)

    def takes_less(agreement: Agreement) -> None:
        agreement.steps += 1
        agreement.say(Kind.STEP, 2)

    for found in run(takes, skips):
        assert isinstance(found, MismatchError)
        assert "is in call 1 of step(), after 0 backward passes" in str(found)
        assert "goes on to its next forward pass after 0 calls of step()" in str(found)
    for found in run(takes, takes_less):
        assert isinstance(found, MismatchError)
        assert "a gradient was set to None" in str(found)


def test_one_may_ask_for_states_alone() -> None:
    def asks(agreement: Agreement) -> list[bytes]:
        found = agreement.say(Kind.STATE, 7)
        agreement.say(Kind.FORWARD)
        assert agreement.end()
        return found

    def goes_on(agreement: Agreement) -> str:
        agreement.say(Kind.FORWARD)
        return "done" if agreement.end() else "gone"

    assert run(asks, goes_on, goes_on) == [[b"0:7", b"1:7", b"2:7"], "done", "done"]
    # And of those who have ended.
    assert run(lambda a: (a.say(Kind.STATE, 1), a.end()), lambda a: a.end()) == [
        ([b"0:1", b"1:1"], True),
        True,
    ]
    assert (
        run(lambda a: a.say(Kind.STATE, 1), lambda a: a.say(Kind.STATE, 1))
        == [[b"0:1", b"1:1"]] * 2
    )


def test_who_goes_on_when_another_has_ended_is_told() -> None:
    goes_on, ended = run(lambda a: a.say(Kind.FORWARD), lambda a: a.end())
    assert isinstance(goes_on, PeerLost)
    assert goes_on.peers == (1,)
    assert "rank 1 has ended its training after 0 calls of step()" in str(goes_on)
    assert ended is False


def test_nothing_is_said_in_a_forked_child() -> None:
    agreement = Agreement(cast(Any, FakeGroup(Ranks(2), 0)), Failures(Peers()), lambda number: b"")
    agreement.disown()
    with pytest.raises(PluginError, match="which a forked child cannot ask"):
        agreement.say(Kind.READ)
    with pytest.raises(PluginError, match="which a forked child cannot ask"):
        agreement.say(Kind.STATE, 0)
    agreement.leave()
