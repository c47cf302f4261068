"""What ranks find out about each other by a store alone."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from together import together
from torch._C._distributed_c10d import HashStore

from bytesched.errors import MismatchError
from bytesched.plugins.c10d import entry
from bytesched.plugins.c10d.entry import Announcement, Entry

#: longer than a test may take: nothing ends by it
TIMEOUT_S = 600.0
Make = Callable[..., Any]


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Make:
    """The group of a rank; of two, unless another size is given."""
    store = HashStore()
    monkeypatch.setattr(entry, "store_of", lambda base: store)

    def make(rank: int, size: int = 2) -> Any:
        return SimpleNamespace(rank=lambda: rank, size=lambda: size)

    return make


def outcome(work: Callable[[], None]) -> str:
    """In a word and its message."""
    try:
        work()
    except Exception as error:  # noqa: BLE001 - which one is what is asked
        return f"{type(error).__name__}: {error}"
    return "entered"


def test_one_that_declines_is_known_at_once_among_many(group: Make) -> None:
    """The fourth never comes."""

    def enter(rank: int) -> str:
        ranks = Entry(group(rank, 4))
        if rank == 1:
            return outcome(lambda: ranks.decline("enabled is off"))
        return outcome(lambda: ranks.agree(["same"], TIMEOUT_S))

    first, second, third = together(enter, 3)
    assert second == "entered"
    assert first == third == "MismatchError: rank 1 does not wrap: enabled is off"


def test_the_next_entry_is_another(group: Make) -> None:
    for rank in range(2):
        Entry(group(rank)).decline("for now")

    def enter(rank: int) -> str:
        return outcome(lambda: Entry(group(rank)).agree(["same"], TIMEOUT_S))

    assert together(enter) == ["entered", "entered"]


def announced(group: Make, *statements: str) -> list[Announcement]:
    return [Announcement(group(rank), [text]) for rank, text in enumerate(statements)]


def test_all_that_announced_the_same_go_on(group: Make) -> None:
    ranks = announced(group, "same", "same")
    assert [rank.objection() for rank in ranks] == ["", ""]
    assert [rank.is_first for rank in ranks] == [True, False]


def test_all_hear_the_same_objection(group: Make) -> None:
    ranks = announced(group, "one", "other")
    first, second = (rank.objection() for rank in ranks)
    assert first == second
    assert "rank 0 has 'one', rank 1 has 'other'" in first


def test_who_comes_first_decides_for_one_that_announces_later(group: Make) -> None:
    (first,) = announced(group, "same")
    why = first.objection()
    assert why.startswith("rank 1 takes no part")
    assert Announcement(group(1), ["same"]).objection() == why


def test_one_that_withdraws_in_time_is_an_objection(group: Make) -> None:
    first, second = announced(group, "same", "same")
    second.withdraw("another optimizer")
    assert first.objection() == "rank 1 does not go on: another optimizer"


def test_one_that_withdraws_too_late_declines_to_enter(group: Make) -> None:
    first, second = announced(group, "same", "same")
    assert not first.objection()
    second.withdraw("it has gone on")
    with pytest.raises(MismatchError, match="rank 1 does not wrap: it has gone on"):
        Entry(group(0)).agree(["same"], TIMEOUT_S)
