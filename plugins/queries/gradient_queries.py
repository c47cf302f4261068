"""What a script asks of gradients between backward and step, while they are not all here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf
from time import monotonic
from typing import Any, Final, Protocol

import torch

from bytesched.round import TAKEN, UNREADABLE, UNTAKEN, Memory

from ..dependency.progress import Progress
from ..figures.meter import Meter
from ..layout.packing import elements
from ..layout.plan import Plan
from ..layout.slots import Slot
from .answers import Answers
from .expressions import Asked, Expression, derived, expression_of
from .operations import ELEMENTWISE, ELEMENTWISE_OF_ALL, NORMS, NORMS_OF_ALL, REDUCTIONS, UNSCALE
from .parts import Places, Rule, rule_of
from .questions import are_plain, digest, is_of_whole_tensor, kept, question_of, unscaling

__all__ = ["GradientQueries", "Summing"]

#: A script that asks more than this in a round gets whole gradients: a norm after each change is
#: a message for every tensor.
_MOST_QUESTIONS: Final = 8

#: A rank that asks alone waits little longer for answers: the others may be waiting for it, in a
#: barrier of the script, before they step.
_PATIENCE_S: Final = 1.0

_Change = Callable[[list[torch.Tensor]], None]


class Summing(Protocol):
    """What sums gradients for their owners."""

    @property
    def is_summed(self) -> bool:
        """Whether the sums of this round that this rank measures are in the arena."""


class GradientQueries:
    """Answers norms of whole gradients after phase one, and notes down changes of each element.

    Every gradient travels as it was summed. What the script does to its elements is done where
    they arrive, by each rank, with the script's own operation: so the bits are those of the
    script's on whole gradients, and nothing that was sent early is sent in vain.

    Args:
        plan: cut by owners.
        rank: this one.
        exchange: with the end of phase one.
        answers: what other ranks found.
        is_whole: whether all gradients have come: no answer is needed then.
        assembled: asks for the gradients of tensors that have several owners; None: every gradient
            comes to every rank, so that it may be looked at then.
        is_told: whether the end of phase one includes what others own of a tensor that is measured
            here.
        lend: called with what changes keep, which another stream of a GPU may read.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        exchange: Summing,
        answers: Answers,
        progress: Progress,
        meter: Meter,
        *,
        is_whole: Callable[[], bool],
        assembled: Callable[[list[Slot]], list[torch.Tensor]] | None,
        is_told: Callable[[Slot], bool],
        lend: Callable[[Iterable[object]], None] = lambda _: None,
    ) -> None:
        self._plan = plan
        self._rank = rank
        self._is_whole = is_whole
        self._assembled = assembled
        self._is_told = is_told
        self._lend = lend
        #: something was asked in this round that needed all of a tensor that has several owners
        self.measured_whole = False
        #: other ranks gave no answer in time
        self._gave_up = False
        self._began_s = monotonic()
        #: what this rank alone sums, and what all ranks sum
        self._mine = [slot for slot in plan.slots if plan.owner(slot) == rank]
        self._shared = [slot for slot in plan.slots if not plan.shares(slot)]
        #: with what ranks own of each
        self._cut = {s: shares for s in plan.slots if len(shares := plan.shares(s)) > 1}
        self._most_parts = max(map(len, self._cut.values()), default=0)
        self._exchange = exchange
        self._answers = answers
        self._progress = progress
        self._meter = meter
        self._index = {slot: index for index, slot in enumerate(plan.slots)}
        self._places = Places(plan)
        #: whether every gradient has a maximum, say, and one that is a real number
        self._reduces = not any(s.view.is_complex() or not s.view.numel() for s in plan.slots)
        #: by question and the changes before it: one number for each slot
        self._known: dict[tuple[str, int], torch.Tensor] = {}
        self._questions = 0
        #: a digest of all changes in this round: what ranks must have in common for an answer
        self._changes = 0
        #: what the script has asked about or changed in this round
        self._asked = Asked(plan.slots, progress)
        #: the backward pass of this round has not ended: hooks see gradients of the last one
        self._is_backward = False

    def begin_round(self) -> None:
        """A new backward pass begins."""
        self._is_backward = True
        self._known.clear()
        self._questions = self._changes = 0
        self.measured_whole = self._gave_up = False
        self._began_s = monotonic()
        self._asked.clear()
        self._answers.begin_round()

    @property
    def asked(self) -> Asked:
        """What the script has asked about or changed in this round."""
        return self._asked

    def backward_ends(self) -> None:
        """All gradients of the round are those that are asked about."""
        self._is_backward = False

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``func`` returns for lazy gradients, without waiting for them; or NotImplemented."""
        if self._is_backward:
            return NotImplemented
        if func in NORMS or (func in REDUCTIONS and self._reduces):
            return self._norm(func, args, kwargs)
        if func in NORMS_OF_ALL:
            return self._norms(func, args, kwargs)
        if func in ELEMENTWISE:
            return self._change_one(func, args, kwargs)
        if func in ELEMENTWISE_OF_ALL:
            return self._change_all(func, args, kwargs)
        if func is UNSCALE:
            return self._unscale(args, kwargs)
        return derived(func, args, kwargs, with_memory=self._assembled is None)

    # -- norms -------------------------------------------------------------------------

    def _norm(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = self._expressions(args[:1])
        if found is None or not is_of_whole_tensor(func, args[1:], kwargs):
            return NotImplemented
        (expression,) = found

        def measure(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            return [func(expression.of(tensor), *args[1:], **kwargs) for tensor in tensors]

        question = question_of(func, args[1:], kwargs) + expression.text
        rule = self._rule(func, args[1:], kwargs)
        numbers = self._ask(question, measure, [expression.slot], rule)
        return NotImplemented if numbers is None else numbers[0]

    def _norms(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = self._expressions(args[0])
        if not found or not are_plain([*args[1:], *kwargs.values()]):
            return NotImplemented
        first = found[0]
        if {first.text} != {other.text for other in found}:
            return NotImplemented

        def measure(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            made = [first.of(tensor) for tensor in tensors]
            return list(func(made, *args[1:], **kwargs)) if made else []

        question = question_of(func, args[1:], kwargs) + first.text
        rule = self._rule(func, args[1:], kwargs)
        numbers = self._ask(question, measure, [expression.slot for expression in found], rule)
        return NotImplemented if numbers is None else numbers

    def _rule(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Rule:
        return rule_of(func, args, kwargs, self._most_parts)

    def _ask(
        self,
        question: str,
        measure: Callable[[list[torch.Tensor]], list[torch.Tensor]],
        slots: Sequence[Slot],
        rule: Rule,
    ) -> list[torch.Tensor] | None:
        """A number for each slot, as ``measure`` would find it; None: look at whole gradients."""
        self._asked.add(slots)
        if not self._answers.is_open:
            return None
        key = question, self._changes
        if key not in self._known:
            found = self._find(question, measure, rule)
            if found is None:
                return None
            self._known[key] = found
        kinds = {slot.view.dtype: slot.view for slot in slots}
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            dtypes = {
                dtype: measure([torch.ones(1, dtype=dtype, device=view.device)])[0].dtype
                for dtype, view in kinds.items()
            }
            values = self._known[key]
            return [
                values[self._index[slot]].to(slot.view.device, dtypes[slot.view.dtype], copy=True)
                for slot in slots
            ]

    def _find(
        self,
        question: str,
        measure: Callable[[list[torch.Tensor]], list[torch.Tensor]],
        rule: Rule,
    ) -> torch.Tensor | None:
        number = self._questions
        self._questions += 1
        if number >= _MOST_QUESTIONS or self._gave_up:
            return None
        # What was read whole may have been changed out of sight.
        read = [
            index
            for index, slot in enumerate(self._plan.slots)
            # Of others it was a gradient of an earlier round, perhaps on this rank alone.
            if slot.is_read and slot.state in UNTAKEN and not slot.is_apart
        ]
        signature = digest(f"{question} after {self._changes}, without {read}")
        self._wait(lambda: self._exchange.is_summed, "the first phase of all gradients")
        own = torch.zeros(self._places.count, dtype=torch.float64, device="cpu")
        self._measure(own, self._at(self._mine), [s.changed() for s in self._mine], measure)
        self._measure_cut(own, measure, rule)
        self._answers.give(number, signature, own)
        total = self._total(number, signature, own)
        if total is None:
            return None
        numbers = self._places.combined(total, rule)
        chunks = {chunk for slot in self._shared for chunk in slot.chunks}
        under_way = self._progress.round.under_way
        self._wait(lambda: not under_way.sums(chunks), "gradients that all ranks sum")
        at = [self._index[slot] for slot in self._shared]
        self._measure(numbers, at, [slot.changed() for slot in self._shared], measure)
        return numbers

    def _total(self, number: int, signature: int, own: torch.Tensor) -> torch.Tensor | None:
        """The answers of all ranks, added up; None if one gives none, or may not before long."""
        total: torch.Tensor | None = None

        def has_come() -> bool:
            nonlocal total
            # In this order: a rank that has ended the round may have answered before.
            is_missing = self._answers.is_missing(number, signature)
            total = self._answers.total(number, signature, own)
            return total is not None or is_missing or self._is_whole()

        # Where all gradients come here, that ends it.
        until = inf
        if self._assembled is not None:
            # Another rank may still be told sums, which takes less than what was sent until now.
            until = monotonic() + _PATIENCE_S + 2 * (monotonic() - self._began_s)
        self._wait(has_come, "the norms of other ranks' gradients", until)
        self._gave_up = monotonic() >= until
        return total

    def _wait(self, done: Callable[[], bool], what: str, until: float = inf) -> None:
        began = self._meter.moment()
        self._progress.wait(done, what, until=until)
        waited_ns = self._meter.waited("norm of all gradients", began)
        self._meter.causes.asked(waited_ns)

    def _measure(
        self,
        into: torch.Tensor,
        at: Sequence[int],
        gradients: list[torch.Tensor],
        measure: Callable[[list[torch.Tensor]], list[torch.Tensor]],
    ) -> None:
        if not at:
            return
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            # From a GPU, all at once.
            found = torch.stack([value.double().reshape(()) for value in measure(gradients)])
            into[list(at)] = found.to(into.device)

    def _measure_cut(
        self,
        into: torch.Tensor,
        measure: Callable[[list[torch.Tensor]], list[torch.Tensor]],
        rule: Rule,
    ) -> None:
        """Tensors of several owners: each measures its part, or one of them the whole."""
        if rule is Rule.NONE:
            self.measured_whole = self.measured_whole or bool(self._cut)
            mine = [slot for slot in self._cut if self._plan.measurer(slot) == self._rank]
            here = [slot for slot in mine if self._is_told(slot) and not _may_be_other(slot)]
            self._measure(into, self._at(here), [slot.changed() for slot in here], measure)
            if others := [slot for slot in mine if slot not in here]:
                assert self._assembled is not None
                self._measure(into, self._at(others), self._assembled(others), measure)
            return
        at, gradients = [], []
        for slot, shares in self._cut.items():
            for number, share in enumerate(shares):
                if share.rank == self._rank:
                    part = elements(slot.view, slot.view, share.start_at, share.stop_at)
                    part = part.clone() if slot.changes else part
                    for change in slot.changes:
                        change([part])
                    at.append(self._places.of(slot, number))
                    gradients.append(part)
        self._measure(into, at, gradients, measure)

    def _at(self, slots: Iterable[Slot]) -> list[int]:
        return [self._places.of(slot) for slot in slots]

    # -- changes -----------------------------------------------------------------------

    def _change_one(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        slots = self._slots(args[:1])
        values = kept([*args[1:]], kwargs)
        if slots is None or values is None:
            return NotImplemented
        numbers, named = values
        self._lend([*numbers, *named.values()])

        def change(tensors: list[torch.Tensor]) -> None:
            for tensor in tensors:
                func(tensor, *numbers, **named)

        self._note(slots, change, question_of(func, numbers, named))
        return args[0]

    def _change_all(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        slots = self._slots(args[0])
        values = kept([*args[1:]], kwargs)
        if slots is None or values is None:
            return NotImplemented
        numbers, named = values
        self._lend([*numbers, *named.values()])
        what = question_of(func, numbers, named)
        self._note(slots, lambda tensors: func(tensors, *numbers, **named), what)
        return None

    def _unscale(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        slots = self._slots(args[0])
        if slots is None or kwargs or len(args) != 3:
            return NotImplemented
        found_inf, inverse = args[1], args[2].clone()
        self._lend([found_inf, inverse])

        unscale, measure = unscaling(found_inf, inverse)
        question = question_of(UNSCALE, (inverse,), {})
        infs = self._ask(question, measure, slots, Rule.SUM)
        if infs is None:
            return NotImplemented
        if any(bool(inf) for inf in infs):
            found_inf.fill_(1.0)
        self._note(slots, unscale, question)
        return None

    def _note(self, slots: Sequence[Slot], change: _Change, what: str) -> None:
        self._asked.add(slots)
        positions = [self._index[slot] for slot in slots]
        self._changes = digest(f"{self._changes} {what} of {positions}")
        for slot in slots:
            slot.changes.append(change)

    def _slots(self, tensors: Sequence[Any]) -> list[Slot] | None:
        """Those of ``tensors``, if each is a whole gradient itself; see `_expressions`."""
        found = self._expressions(tensors)
        if found is None or [expression for expression in found if expression.text]:
            return None
        return [expression.slot for expression in found]

    def _expressions(self, tensors: Sequence[Any]) -> list[Expression] | None:
        """What ``tensors`` are made of; None if one has to be waited for."""
        found = []
        for tensor in tensors:
            expression = expression_of(tensor)
            if (
                expression is None
                or expression.slot not in self._index
                or expression.slot.memory is Memory.SPOILED
            ):
                return None
            found.append(expression)
        return found


def _may_be_other(slot: Slot) -> bool:
    """Whether something else than what was summed may be in the memory of the gradient."""
    return slot.is_read or slot.state in TAKEN or slot.memory in UNREADABLE
