"""InTurn: events are handled where they are put, one at a time, and nobody waits for a turn."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from bytesched.scheduler import InTurn
from bytesched.task import CommTask

WAIT_S = 10.0
Event = Callable[[], Sequence[CommTask]]


class Handled:
    """Every event that was handled, and on which thread; one of them takes its time."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.threads: list[int] = []
        self.begun = threading.Event()
        self.may_end = threading.Event()

    def quickly(self, event: Event) -> None:
        self.events.append(event)
        self.threads.append(threading.get_ident())

    def slowly(self, event: Event) -> None:
        self.begun.set()
        assert self.may_end.wait(WAIT_S)
        self.quickly(event)


def events(count: int) -> list[Event]:
    return [lambda number=number: () for number in range(count)]  # type: ignore[misc]


def test_an_event_is_handled_by_the_thread_that_puts_it() -> None:
    in_turn, handled = InTurn(), Handled()
    (event,) = events(1)
    in_turn.put(handled.quickly, event)
    assert handled.events == [event]
    assert handled.threads == [threading.get_ident()]


def test_who_puts_one_while_another_is_handled_does_not_wait_and_it_is_not_lost() -> None:
    in_turn, handled = InTurn(), Handled()
    first, second, third = events(3)
    busy = threading.Thread(target=in_turn.put, args=(handled.slowly, first))
    busy.start()
    assert handled.begun.wait(WAIT_S)
    in_turn.put(handled.quickly, second)
    in_turn.put(handled.quickly, third)
    assert handled.events == [], "one at a time"
    assert not in_turn.join(0.0)
    handled.may_end.set()
    busy.join(WAIT_S)
    assert handled.events == [first, second, third]
    assert handled.threads == [busy.ident] * 3
    assert in_turn.join(0.0)


def test_an_event_that_is_put_inside_a_handler_comes_after_it() -> None:
    in_turn, handled = InTurn(), Handled()
    outer, inner = events(2)

    def handle(event: Event) -> None:
        in_turn.put(handled.quickly, inner)
        handled.quickly(event)

    in_turn.put(handle, outer)
    assert handled.events == [outer, inner]


def test_after_close_nothing_more_is_handled() -> None:
    in_turn, handled = InTurn(), Handled()
    in_turn.close()
    in_turn.put(handled.quickly, events(1)[0])
    assert handled.events == []
    assert in_turn.join(0.0)


def test_events_of_many_threads_are_all_handled_one_at_a_time() -> None:
    in_turn, handled = InTurn(), Handled()
    inside: list[int] = []

    def handle(event: Event) -> None:
        inside.append(1)
        assert len(inside) == 1
        handled.quickly(event)
        inside.pop()

    def tell(mine: list[Event]) -> None:
        for event in mine:
            in_turn.put(handle, event)

    told = [events(200) for _ in range(8)]
    tellers = [threading.Thread(target=tell, args=(mine,)) for mine in told]
    for teller in tellers:
        teller.start()
    for teller in tellers:
        teller.join(WAIT_S)
    assert in_turn.join(WAIT_S)
    assert len(handled.events) == 1600
    for mine in told:
        assert [event for event in handled.events if event in mine] == mine
