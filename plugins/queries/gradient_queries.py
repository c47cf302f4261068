"""What a script asks of gradients between backward and step, while they are not all here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf
from time import monotonic
from typing import Any, Final, Protocol

import torch

from bytesched.round import ALLOWED, UNTAKEN, Memory, Use

from ..dependency.progress import Progress
from ..figures.meter import Meter
from ..layout.memory import lies_over
from ..layout.packing import elements
from ..layout.plan import Plan
from ..layout.slots import Slot
from ..proxies.lazy_grads import LazyGrad, alias_of, moves_alone
from .answers import Answers
from .operations import (
    ALIASES,
    ELEMENTWISE,
    ELEMENTWISE_OF_ALL,
    NORMS,
    NORMS_OF_ALL,
    REDUCTIONS,
    UNSCALE,
)
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
        """Whether the sums of this round that this rank owns are in the arena."""


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
        assembled: asks for the gradients of tensors that have several owners.
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
        assembled: Callable[[list[Slot]], list[torch.Tensor]],
        lend: Callable[[Iterable[object]], None] = lambda _: None,
    ) -> None:
        self._plan = plan
        self._rank = rank
        self._assembled = assembled
        self._lend = lend
        #: other ranks gave no answer in time
        self._gave_up = False
        self._began_s = monotonic()
        #: what this rank alone sums
        self._mine = [slot for slot in plan.slots if plan.owner(slot) == rank]
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
        #: the backward pass of this round has not ended: hooks see gradients of the last one
        self._is_backward = False

    def begin_round(self) -> None:
        """A new backward pass begins."""
        self._is_backward = True
        self._known.clear()
        self._questions = self._changes = 0
        self._gave_up = False
        self._began_s = monotonic()
        self._answers.begin_round()

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
        if func in ALIASES and not moves_alone(args[0]) and self._slots(args[:1]):
            return alias_of(args[0])
        if func is torch.Tensor.cpu and not args[1:] and not kwargs and not args[0].is_cuda:
            return args[0]
        return NotImplemented

    # -- norms -------------------------------------------------------------------------

    def _norm(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        slots = self._slots(args[:1])
        if slots is None or not is_of_whole_tensor(func, args[1:], kwargs):
            return NotImplemented

        def measure(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            return [func(tensor, *args[1:], **kwargs) for tensor in tensors]

        rule = self._rule(func, args[1:], kwargs)
        numbers = self._ask(question_of(func, args[1:], kwargs), measure, slots, rule)
        return NotImplemented if numbers is None else numbers[0]

    def _norms(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        slots = self._slots(args[0])
        if not slots or not are_plain([*args[1:], *kwargs.values()]):
            return NotImplemented

        def measure(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            return list(func(tensors, *args[1:], **kwargs)) if tensors else []

        rule = self._rule(func, args[1:], kwargs)
        numbers = self._ask(question_of(func, args[1:], kwargs), measure, slots, rule)
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
        return self._places.combined(total, rule)

    def _total(self, number: int, signature: int, own: torch.Tensor) -> torch.Tensor | None:
        """The answers of all ranks, added up; None if one gives none, or may not before long."""
        total: torch.Tensor | None = None

        def has_come() -> bool:
            nonlocal total
            # In this order: a rank that has ended the round may have answered before.
            is_missing = self._answers.is_missing(number, signature)
            total = self._answers.total(number, signature, own)
            return total is not None or is_missing

        # Another rank may still be sent gradients, which takes less than what was sent until now.
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
            if mine := [slot for slot in self._cut if self._plan.measurer(slot) == self._rank]:
                self._measure(into, self._at(mine), self._assembled(mine), measure)
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
        positions = [self._index[slot] for slot in slots]
        self._changes = digest(f"{self._changes} {what} of {positions}")
        for slot in slots:
            slot.changes.append(change)

    def _slots(self, tensors: Sequence[Any]) -> list[Slot] | None:
        """Whose gradients ``tensors`` are; None if one has to be waited for."""
        found = []
        for tensor in tensors:
            slot = _slot_of(tensor)
            if slot is None or slot not in self._index or slot.memory is Memory.SPOILED:
                return None
            found.append(slot)
        return found


def _slot_of(tensor: object) -> Slot | None:
    """Whose gradient ``tensor`` is, if that may be on the wire and no step has taken it.

    None where the gradient was read whole in this round: there may be aliases of its memory. None
    for what was kept from an earlier round, whose memory is its own.
    """
    slot = tensor.owner if type(tensor) is LazyGrad else None
    if not isinstance(slot, Slot) or not lies_over(tensor, slot.view):  # type: ignore[arg-type]
        return None
    is_askable = slot.state in ALLOWED[Use.ASK] and not slot.is_read
    return slot if is_askable else None
