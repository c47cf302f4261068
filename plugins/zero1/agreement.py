"""What ranks say to each other before they do something together: it must be the same on all.

A collective that other ranks do not take part in waits for ever, and one of another size ends the
process. So every rank says what comes next, in a few numbers on a group of their own. Who asks for
an optimizer's state may ask alone: the others answer when they come to their next statement, or to
a barrier of the script.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Final, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from bytesched.errors import BytesschedError, MismatchError, PeerLost, PluginError, TransportError

from ..failures import Failures
from ..routes.group import Group


class Kind(Enum):
    """What a rank is about to do, in words; and what differs between ranks that do the same."""

    FORWARD = "goes on to its next forward pass after {steps} calls of step()", ""
    STEP = (
        "is in call {steps} of step(), after {rounds} backward passes",
        "step() does not take the same gradients on all ranks, or not with the same changes: on "
        "one of them a gradient was set to None, or scaled by another number",
    )
    ASK = (
        "asks for a norm, or another number, of gradients of backward pass {rounds}",
        "ranks ask for different numbers of gradients",
    )
    READ = (
        "reads gradients of backward pass {rounds}, or begins another while it has them",
        "ranks read different gradients",
    )
    STATE = (
        "asks for the state of its optimizer after {steps} calls of step()",
        "ranks ask for the states of different optimizers",
    )
    END = "has ended its training after {steps} calls of step()", ""
    BARRIER = "is in a barrier after {steps} calls of step()", ""


_KINDS: Final = tuple(Kind)


class _Statement(NamedTuple):
    """One rank's."""

    kind: Kind
    rounds: int
    steps: int
    digest: int

    @property
    def done(self) -> tuple[int, int]:
        """How many rounds have begun, and steps been taken, before this."""
        return self.rounds, self.steps - (self.kind is Kind.STEP)

    def __str__(self) -> str:
        words: str = self.kind.value[0]
        return words.format(rounds=self.rounds, steps=self.steps)


class _GoesOn(Exception):
    """Another rank goes on where this one has ended."""


class Agreement:
    """The statements of one session, in the order of its script.

    Args:
        group: of Gloo; nothing else uses it.
        answer: this rank's bytes for those who ask for a state, by its number.
    """

    def __init__(self, group: Group, failures: Failures, answer: Callable[[int], bytes]) -> None:
        self._group = group
        self._failures = failures
        self._answer = answer
        #: a model that nothing refers to any more ends in a thread of its own
        self._lock = threading.RLock()
        #: backward passes that have begun, and calls of ``step()``
        self.rounds = self.steps = 0
        #: what this rank has said without waiting for the others, and with what
        self._said: tuple[_Statement, Any, torch.Tensor, torch.Tensor] | None = None
        self._is_last_said = False
        self._is_disowned = False

    def say(self, kind: Kind, digest: int = 0) -> list[bytes]:
        """Returns when all ranks have said the same; what each answers, if it is a question.

        Raises `MismatchError` or `PeerLost`, on every rank, if one says something else.
        """
        if self._is_disowned:
            raise PluginError(
                "gradients and optimizer states of shard=True are on other ranks, which a forked "
                "child cannot ask"
            )
        with self._lock:
            self._heard()
            self._begin(_Statement(kind, self.rounds, self.steps, digest))
            return self._heard()

    def barrier_begins(self) -> None:
        """The script comes to a barrier of all ranks. Waits for none that have ended here."""
        if self.is_over:
            return
        with self._lock:
            if not self.is_over:
                self.say(Kind.BARRIER)

    def numbers(self, mine: torch.Tensor) -> torch.Tensor:
        """A row of each rank's numbers, as many as those of this one; all have agreed on that."""
        rows = mine.new_empty(self._group.size * len(mine))
        self._wait(self._group.all_gather(rows, mine), "numbers about gradients")
        return rows.view(self._group.size, -1)

    def leave(self) -> None:
        """This rank says nothing more, and waits for nobody. Idempotent."""
        with self._lock:
            if self.is_over:
                return
            self._heard()
            self._is_last_said = True
            self._begin(_Statement(Kind.END, self.rounds, self.steps, 0))

    def end(self) -> bool:
        """Answers others until all have ended; False if one goes on, is gone, or takes too long."""
        try:
            self.leave()
            self._heard()
        except (_GoesOn, BytesschedError):
            return False
        return self._failures.error is None

    @property
    def is_over(self) -> bool:
        """Whether nothing more is said here."""
        return self._is_last_said or self._is_disowned or self._failures.error is not None

    def disown(self) -> None:
        """In a forked child: nothing can be said there."""
        self._is_disowned = True

    # -- statements --------------------------------------------------------------------

    def _begin(self, statement: _Statement) -> None:
        numbers = [_KINDS.index(statement.kind), *statement[1:]]
        mine = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        rows = mine.new_empty(self._group.size * len(mine))
        self._said = statement, self._group.all_gather(rows, mine), rows, mine

    def _heard(self) -> list[bytes]:
        """Returns when all ranks have said what this one has said last; with answers to it."""
        while self._said is not None:
            (statement, work, rows, _), self._said = self._said, None
            self._wait(work, "what ranks are about to do")
            said = [
                _Statement(_KINDS[kind], *numbers)
                for kind, *numbers in rows.view(self._group.size, -1).tolist()
            ]
            asking = [rank for rank, one in enumerate(said) if one.kind is Kind.STATE]
            if asking and len({said[rank].digest for rank in asking}) == 1:
                found = self._states(asking, said[asking[0]].digest)
                if self._group.rank in asking:
                    return found
                # Once more: one has asked something meanwhile.
                self._begin(statement)
            elif {one.kind for one in said} == {Kind.BARRIER, Kind.END}:
                # Of those who have ended, the script may come to the barrier, too.
                if statement.kind is Kind.END:
                    self._begin(statement)
            elif any(one != statement for one in said):
                self._refuse(said)
        return []

    def _refuse(self, said: Sequence[_Statement]) -> NoReturn:
        rank = self._group.rank
        mine = said[rank]
        if mine.kind is Kind.END:
            # Those who go on raise it.
            raise _GoesOn
        ended = [other for other, one in enumerate(said) if one.kind is Kind.END]
        if ended:
            self._failures.raise_first(
                PeerLost(
                    f"rank {ended[0]} {said[ended[0]]}, rank {rank} {mine}: give every rank the "
                    "same number of batches, or see the log of that rank for the reason",
                    peers=ended,
                    rank=rank,
                )
            )
        other = next(other for other, one in enumerate(said) if one != mine)
        if said[other][:3] == mine[:3]:
            why = f"{mine.kind.value[1]} (ranks {rank} and {other})"
        else:
            why = f"rank {rank} {mine}, rank {other} {said[other]}"
            if said[other].done != mine.done:
                why += ": on one of them a step was left out"
        self._failures.raise_first(
            MismatchError(
                f"{why}. With shard=True each rank waits for what the others own: do the same on "
                "all ranks, or train without shard=True"
            )
        )

    # -- states ------------------------------------------------------------------------

    def _states(self, asking: Sequence[int], number: int) -> list[bytes]:
        """What each rank answers; empty on ranks that do not ask."""
        try:
            mine = self._answer(number)
        except Exception as error:  # noqa: BLE001 - it is raised here, and ends the others
            self._failures.raise_first(error)
        sizes = self.numbers(torch.tensor([len(mine)], device="cpu")).flatten().tolist()
        group = self._group
        into = sizes if group.rank in asking else [0] * group.size
        sent = torch.frombuffer(bytearray(mine * len(asking)), dtype=torch.uint8)
        received = torch.empty(sum(into), dtype=torch.uint8, device="cpu")
        sends = [len(mine) if rank in asking else 0 for rank in range(group.size)]
        self._wait(group.all_to_all(received, sent, into, sends), "states of optimizers")
        return [part.numpy().tobytes() for part in received.split(into)]

    def _wait(self, work: Any, task: str) -> None:
        try:
            self._group.wait(work, task=task)
        except TransportError as error:
            self._failures.raise_first(error)


#: what is called before a barrier, and of which group
_answering: dict[Callable[[], None], Any] = {}


def answer_in_barriers(group: dist.ProcessGroup, answer: Callable[[], None]) -> Callable[[], None]:
    """Calls ``answer`` before each barrier of ``group`` from now on; returns what ends that."""
    kind: Any = dist.ProcessGroup
    barrier = kind.barrier

    @functools.wraps(barrier)
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        for answer in [answer for answer, known in list(_answering.items()) if known is group]:
            answer()
        return barrier(group, *args, **kwargs)

    if not hasattr(barrier, "is_answered"):
        call.is_answered = True  # type: ignore[attr-defined]
        kind.barrier = call
    _answering[answer] = group
    return lambda: _answering.pop(answer, None)
