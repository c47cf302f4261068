"""What a script asks of gradients between backward and step(), while they are on their way.

Iterations repeat: what was asked in the last one is measured in this one as soon as sums are there,
by their owners, with the script's own operation, and told to all ranks in front of the gradients.
So an answer needs no other rank's script. What was not foreseen waits for whole gradients. What is
done to each element is noted down, and made where gradients arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch

from ..proxies.pending_grads import PendingGrad
from ..queries import (
    ELEMENTWISE,
    ELEMENTWISE_OF_ALL,
    NORMS_OF_ALL,
    UNSCALE,
    are_plain,
    digest,
    is_of_whole_tensor,
    kept,
    question_of,
    unscaling,
)
from ..update.surroundings import Surroundings, unseen
from .buckets import Change, Chunk, Member

#: How many questions of a round are foreseen: finite after a loss was scaled, and a norm; two more.
_MOST: Final = 4

Measure = Callable[[list[torch.Tensor]], list[torch.Tensor]]


@dataclass(frozen=True)
class Question:
    """A number for each gradient.

    Args:
        text: with what was done to gradients before.
        changes: that.
    """

    text: str
    measure: Measure
    changes: tuple[Change, ...]
    surroundings: Surroundings

    def of(self, gradients: list[torch.Tensor]) -> list[float]:
        """The numbers for ``gradients``, which stay as they are."""
        with self.surroundings.entered(), torch.no_grad():
            if self.changes:
                gradients = [gradient.clone() for gradient in gradients]
                for change in self.changes:
                    change(gradients)
            found = torch.stack([value.double().reshape(()) for value in self.measure(gradients)])
        numbers: list[float] = found.tolist()
        return numbers


@dataclass(frozen=True)
class Call:
    """What a script asks of gradients that are on their way: a number for each of ``members``."""

    func: Any
    #: without the gradients
    args: Sequence[Any]
    kwargs: dict[str, Any]
    measure: Measure
    members: Sequence[Member]

    def question(self) -> Question | None:
        """With the changes so far; None if these differ."""
        first, *others = self.members
        if any(member.history != first.history for member in others):
            return None
        text = f"{question_of(self.func, self.args, self.kwargs)} after {first.history}"
        return Question(text, self.measure, tuple(first.changes), Surroundings.here())

    def kinds(self) -> dict[torch.dtype, torch.dtype]:
        """What kind of number is measured of each kind of gradient; raises as measuring does."""
        with unseen():
            return {
                dtype: self.measure([torch.ones(1, dtype=dtype, device="cpu")])[0].dtype
                for dtype in {member.view.dtype for member in self.members}
            }

    def answer(
        self, numbers: Iterable[torch.Tensor], kinds: Mapping[torch.dtype, torch.dtype]
    ) -> list[torch.Tensor]:
        """``numbers``, where the gradients are and of the `kinds`."""
        with unseen():
            return [
                number.to(member.view.device, kinds[member.view.dtype], copy=True)
                for number, member in zip(numbers, self.members, strict=True)
            ]


#: The numbers that a call would find; None: it waits for its gradients.
Ask: TypeAlias = Callable[[Call], list[torch.Tensor] | None]


def answered(func: Any, args: Sequence[Any], kwargs: dict[str, Any], ask: Ask) -> Any:
    """What ``func``, of `ASKING`, returns for gradients that have not come; or NotImplemented."""
    members = asked_of(args)
    if not members:
        return NotImplemented
    # What is kept of it keeps no gradient.
    others = args[1:]
    if func in ELEMENTWISE or func in ELEMENTWISE_OF_ALL:
        if (values := kept(others, kwargs)) is None:
            return NotImplemented
        _note(members, _done(func, *values), question_of(func, *values))
        return None if func in ELEMENTWISE_OF_ALL else args[0]
    if func is UNSCALE:
        return _unscaled(members, others, kwargs, ask)
    is_of_all = func in NORMS_OF_ALL
    if is_of_all:
        can_ask = are_plain([*others, *kwargs.values()])
    else:
        can_ask = is_of_whole_tensor(func, others, kwargs)
    if not can_ask:
        return NotImplemented
    numbers = ask(Call(func, others, kwargs, _done(func, others, kwargs), members))
    if numbers is None:
        return NotImplemented
    return numbers if is_of_all else numbers[0]


def _unscaled(
    members: Sequence[Member], args: Sequence[Any], kwargs: dict[str, Any], ask: Ask
) -> Any:
    if kwargs or len(args) != 2:
        return NotImplemented
    found_inf, inverse = args[0], args[1].clone()
    unscale, measure = unscaling(found_inf, inverse)
    text = question_of(UNSCALE, (inverse,), {})
    infs = ask(Call(UNSCALE, (inverse,), {}, measure, members))
    if infs is None:
        return NotImplemented
    if any(bool(inf) for inf in infs):
        found_inf.fill_(1.0)
    _note(members, unscale, text)
    return None


class Foreseen:
    """The questions of one session whose gradients go in two halves.

    Args:
        numbers: what all ranks have measured, added up; waits for it.
    """

    def __init__(self, rank: int, numbers: Callable[[], torch.Tensor]) -> None:
        self._rank = rank
        self._numbers = numbers
        #: of the last round that asked something, those that may come again, and of this one
        self._foreseen: list[Question] = []
        self._asked: list[Question] = []
        #: texts of the last round
        self._before: frozenset[str] = frozenset()
        #: of the round: where the numbers of each gradient are
        self._places: dict[Member, int] = {}
        #: by question, one number for each place; None before they are looked at
        self._known: dict[str, torch.Tensor] | None = None

    def round_begins(self) -> None:
        """What is asked from now on is asked of a new round."""
        if self._asked:
            # After a change by another number each time nothing comes again.
            before, self._before = self._before, frozenset(one.text for one in self._asked)
            self._foreseen = [one for one in self._asked if not one.changes or one.text in before]
            self._asked = []
        self._known = None

    def forget(self) -> None:
        """Nothing is foreseen, and no gradient is kept."""
        self._foreseen, self._asked, self._known = [], [], None
        self._places = {}

    def measured(self, chunks: Iterable[Chunk]) -> torch.Tensor:
        """This rank's numbers of what it owns, to be added to those of others. Any thread."""
        buckets = {chunk.bucket: None for chunk in chunks}
        members = [member for bucket in buckets for member in bucket.members]
        self._places = {member: place for place, member in enumerate(members)}
        mine = [member for member in members if member.owner == self._rank]
        at = [self._places[member] for member in mine]
        # Of each question a digest, which shows whether the other rank foresees it, too.
        rows = torch.zeros(_MOST, 1 + len(members), dtype=torch.float64, device="cpu")
        for row, question in zip(rows, self._foreseen, strict=False):
            try:
                found = question.of([member.view for member in mine]) if mine else []
            except Exception:  # noqa: BLE001 - the script's own call raises it, if it comes
                continue
            row[0] = digest(question.text)
            row[1:][at] = torch.tensor(found, dtype=torch.float64, device="cpu")
        return rows.view(-1)

    def ask(self, call: Call) -> list[torch.Tensor] | None:
        """See `Ask`."""
        question = call.question()
        if question is None:
            return None
        if len(self._asked) < _MOST and all(one.text != question.text for one in self._asked):
            self._asked.append(question)
        known = self._look()
        if question.text not in known or any(one not in self._places for one in call.members):
            return None
        numbers = known[question.text]
        at = (self._places[member] for member in call.members)
        return call.answer((numbers[place] for place in at), call.kinds())

    def _look(self) -> dict[str, torch.Tensor]:
        if self._known is None:
            rows = self._numbers().view(_MOST, -1)
            self._known = {
                question.text: row[1:]
                for question, row in zip(self._foreseen, rows, strict=False)
                if float(row[0]) == 2 * digest(question.text)
            }
        return self._known


def asked_of(args: Sequence[Any]) -> list[Member] | None:
    """Whose gradients the first argument is; None if one of them is none that waits for a step."""
    first = args[0] if args else None
    members = []
    for tensor in first if isinstance(first, (list, tuple)) else [first]:
        # Another thread may make it an ordinary one meanwhile.
        member = getattr(tensor, "sum_", None) if type(tensor) is PendingGrad else None
        if member is None or member.taken:
            return None
        members.append(member)
    return members


def _done(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[[list[Any]], Any]:
    """Does the same to a list of gradients, together or one by one, and returns what is found."""
    if func in NORMS_OF_ALL | ELEMENTWISE_OF_ALL:
        return lambda gradients: func(gradients, *args, **kwargs)
    return lambda gradients: [func(gradient, *args, **kwargs) for gradient in gradients]


def _note(members: Sequence[Member], change: Change, text: str) -> None:
    for member in members:
        member.changes.append(change)
        member.history = str(digest(f"{member.history} {text}"))
