"""What a script asks of gradients between backward and step(), while they are on their way.

Iterations repeat: what was asked in the last one is measured in this one as soon as sums are there,
by their owners, with the script's own operation, and told to all ranks in front of the gradients.
So an answer needs no other rank's script. What was not foreseen waits for whole gradients. What is
done to each element is noted down, and made where gradients arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from ..proxies.pending_grads import PendingGrad
from ..queries import (
    ASKING,
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


class Questions:
    """Of one session, where gradients go in two halves.

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

    def __call__(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What ``func`` returns for gradients that have not come; or NotImplemented."""
        if func not in ASKING:
            return NotImplemented
        if func in ELEMENTWISE or func in ELEMENTWISE_OF_ALL:
            return self._change(func, args, kwargs)
        return self._unscale(args, kwargs) if func is UNSCALE else self._norm(func, args, kwargs)

    # -- numbers -----------------------------------------------------------------------

    def _norm(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        members = asked_of(args)
        # What is kept of it keeps no gradient.
        others = args[1:]
        is_of_all = func in NORMS_OF_ALL
        if is_of_all:
            can_ask = are_plain([*others, *kwargs.values()])
        else:
            can_ask = is_of_whole_tensor(func, others, kwargs)
        if not members or not can_ask:
            return NotImplemented

        def measure(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
            if is_of_all:
                return list(func(gradients, *others, **kwargs))
            return [func(gradient, *others, **kwargs) for gradient in gradients]

        numbers = self._ask(func, others, kwargs, measure, members)
        if numbers is None:
            return NotImplemented
        return numbers if is_of_all else numbers[0]

    def _ask(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        measure: Measure,
        members: Sequence[Member],
    ) -> list[torch.Tensor] | None:
        """A number for each of ``members``, as ``measure`` would find it; None: wait for them."""
        question = self._question(func, args, kwargs, measure, members)
        if question is None:
            return None
        if len(self._asked) < _MOST and all(one.text != question.text for one in self._asked):
            self._asked.append(question)
        known = self._look()
        if question.text not in known or any(member not in self._places for member in members):
            return None
        numbers = known[question.text]
        at = (self._places[member] for member in members)
        kinds = self._kinds(measure, members)
        return self._as_measured([numbers[place] for place in at], kinds, members)

    @staticmethod
    def _question(
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        measure: Measure,
        members: Sequence[Member],
    ) -> Question | None:
        """What ``func`` asks, after the changes so far; None if these differ."""
        history = members[0].history
        if any(member.history != history for member in members):
            return None
        text = f"{question_of(func, args, kwargs)} after {history}"
        return Question(text, measure, tuple(members[0].changes), Surroundings.here())

    @staticmethod
    def _kinds(measure: Measure, members: Sequence[Member]) -> dict[torch.dtype, torch.dtype]:
        """What kind of number ``measure`` returns for each kind of gradient; raises as it does."""
        with unseen():
            return {
                dtype: measure([torch.ones(1, dtype=dtype, device="cpu")])[0].dtype
                for dtype in {member.view.dtype for member in members}
            }

    @staticmethod
    def _as_measured(
        numbers: Iterable[torch.Tensor],
        kinds: Mapping[torch.dtype, torch.dtype],
        members: Sequence[Member],
    ) -> list[torch.Tensor]:
        """``numbers`` of ``members``, where they are and of the kinds of `_kinds`."""
        with unseen():
            return [
                number.to(member.view.device, kinds[member.view.dtype], copy=True)
                for number, member in zip(numbers, members, strict=True)
            ]

    def _look(self) -> dict[str, torch.Tensor]:
        if self._known is None:
            rows = self._numbers().view(_MOST, -1)
            self._known = {
                question.text: row[1:]
                for question, row in zip(self._foreseen, rows, strict=False)
                if float(row[0]) == 2 * digest(question.text)
            }
        return self._known

    # -- changes -----------------------------------------------------------------------

    def _change(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        members, values = asked_of(args), kept(args[1:], kwargs)
        if not members or values is None:
            return NotImplemented
        numbers, named = values
        is_of_all = func in ELEMENTWISE_OF_ALL

        def change(gradients: list[torch.Tensor]) -> None:
            if is_of_all:
                func(gradients, *numbers, **named)
                return
            for gradient in gradients:
                func(gradient, *numbers, **named)

        _note(members, change, question_of(func, numbers, named))
        return None if is_of_all else args[0]

    def _unscale(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        members = asked_of(args)
        if not members or kwargs or len(args) != 3:
            return NotImplemented
        found_inf, inverse = args[1], args[2].clone()

        unscale, measure = unscaling(found_inf, inverse)
        text = question_of(UNSCALE, (inverse,), {})
        infs = self._ask(UNSCALE, (inverse,), {}, measure, members)
        if infs is None:
            return NotImplemented
        if any(bool(inf) for inf in infs):
            found_inf.fill_(1.0)
        _note(members, unscale, text)
        return None

    def __repr__(self) -> str:
        return f"<Questions: {len(self._foreseen)} foreseen, {len(self._asked)} asked>"


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


def _note(members: Sequence[Member], change: Change, text: str) -> None:
    for member in members:
        member.changes.append(change)
        member.history = str(digest(f"{member.history} {text}"))
