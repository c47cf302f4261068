"""The state of optimizers where every rank holds that of its own parameters alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from bytesched.errors import PluginError, SchedulerTimeout

from ..dependency.context import Context
from ..layout.plan import Plan
from ..layout.slots import Slot
from ..update.deferred import Deferred
from ..update.optimizer_state import GuardedState
from .checkpoint import HeldEntry, plain_name
from .rank_answers import Reply
from .rank_calls import Ask, gathered, packed
from .shards import OwnedShards, cut_entry, whole_entry

__all__ = ["OptimizerShards", "StepTaken"]


@dataclass(eq=False)
class _History:
    """The steps of one optimizer, counted from 1."""

    deferred: Deferred
    taken: int = 0
    #: the last one that has been applied to any parameter, or is about to be
    begun: int = 0
    #: how many parameters those that are not complete have still to update
    left: dict[int, int] = field(default_factory=dict)
    #: how often a state was loaded; and by that number, what it took the place of since the last
    #: step: another rank may still ask for it
    loads: int = 0
    replaced: dict[int, dict[int, Any]] = field(default_factory=dict)

    def is_complete(self, steps: int, loads: int) -> bool:
        """Whether so many steps have been applied to all parameters, and states been loaded."""
        is_applied = self.taken >= steps and not any(number <= steps for number in self.left)
        return is_applied and self.loads >= loads


class StepTaken:
    """One step of an optimizer, as far as this rank updates anything in it."""

    def __init__(self, optimizer_shards: OptimizerShards, history: _History) -> None:
        self._optimizer_shards = optimizer_shards
        self._history = history
        self._number = history.taken

    def begins(self) -> None:
        """The state is changed from here on."""
        self._optimizer_shards.begin(self._history, self._number)

    def ends(self, slots: int) -> None:
        """So many of its parameters have been updated."""
        self._optimizer_shards.end(self._history, self._number, slots)


class OptimizerShards:
    """Which entries of optimizers' states are here, and where the others are.

    An entry is asked for by numbers of steps and of states loaded: a rank that is behind answers
    when it has come as far. One that has loaded another state since still has that; one that has
    stepped has not.

    Args:
        ask: asks other ranks; in the user's thread, and of none before its first use.
        waits_for_ranks: called before a wait for other ranks' steps.
    """

    def __init__(
        self,
        plan: Plan,
        context: Context,
        ownerships: OwnedShards,
        ask: Ask,
        waits_for_ranks: Callable[[], None],
    ) -> None:
        self._plan = plan
        self._ownerships = ownerships
        self._progress = context.progress
        self._rank = context.backend.rank
        self._timeout_s = context.backend.timeout_s
        self._ask = ask
        self._waits_for_ranks = waits_for_ranks
        self._histories: list[_History] = []
        self._handles: list[RemovableHandle] = []
        #: held while entries are read for another rank, and when a step begins to change them
        self._reading = threading.Lock()

    def introduce(self, deferred: Deferred) -> None:
        """``deferred`` is one of the session's optimizers from now on.

        One that was let go of by now counts: ranks ask for states by number.
        """
        if deferred.is_alive:
            self._hook(deferred)
            self._drop_foreign(deferred)
        with self._progress.lock:
            self._histories.append(_History(deferred))
            self._progress.notify()

    def _hook(self, deferred: Deferred) -> None:
        optimizer = deferred.optimizer
        self._handles += [
            optimizer.register_state_dict_pre_hook(lambda _: _state_of(deferred).packs()),
            optimizer.register_state_dict_post_hook(
                partial(self._complete, deferred), prepend=True
            ),
            optimizer.register_load_state_dict_pre_hook(lambda _, __: self._is_replaced(deferred)),
            optimizer.register_load_state_dict_post_hook(lambda _: self._is_loaded(deferred)),
        ]

    def close(self) -> None:
        """Takes its hooks off."""
        for handle in self._handles:
            handle.remove()

    # -- steps -------------------------------------------------------------------------

    def step(self, deferred: Deferred, slots: int, foreign: Iterable[Slot]) -> StepTaken:
        """``deferred`` takes a step, which updates so many parameters here, and others ``foreign``.

        Some may be in both.
        """
        history = self._history(deferred)
        self._lie_elsewhere(deferred, foreign)
        with self._progress.lock:
            history.taken += 1
            if slots:
                history.left[history.taken] = slots
            self._progress.notify()
        return StepTaken(self, history)

    def begin(self, history: _History, number: int) -> None:
        """See `StepTaken.begins`."""
        with self._reading:
            history.begun = max(history.begun, number)
            history.replaced.clear()

    def end(self, history: _History, number: int, slots: int) -> None:
        """See `StepTaken.ends`."""
        with self._progress.lock:
            history.left[number] -= slots
            if not history.left[number]:
                del history.left[number]
            self._progress.notify()

    # -- here --------------------------------------------------------------------------

    def number_of(self, deferred: Deferred) -> int:
        """By which ranks know an optimizer."""
        return self._histories.index(self._history(deferred))

    def _history(self, deferred: Deferred) -> _History:
        return next(history for history in self._histories if history.deferred is deferred)

    def _is_replaced(self, deferred: Deferred) -> None:
        """Another state is about to be loaded."""
        history = self._history(deferred)
        with self._reading:
            history.replaced[history.loads] = self._entries(deferred)

    def _is_loaded(self, deferred: Deferred) -> None:
        """It was."""
        history = self._history(deferred)
        with self._reading:
            self._drop_foreign(deferred)
            history.loads += 1
        with self._progress.lock:
            self._progress.notify()

    def _drop_foreign(self, deferred: Deferred) -> None:
        """What other ranks hold of the state is let go of."""
        state = _state_of(deferred)
        slots = [slot for slot in self._plan.slots if dict.get(state, slot.parameter) is not None]
        self._lie_elsewhere(deferred, [slot for slot in slots if self._ownerships.foreign[slot]])
        for slot in slots:
            part = self._ownerships.parts.get(slot)
            if slot not in self._ownerships.own:
                dict.pop(state, slot.parameter, None)
            elif part is not None and (entry := dict.get(state, slot.parameter)) is not None:
                dict.__setitem__(state, slot.parameter, cut_entry(entry, slot, part.share))

    def _lie_elsewhere(self, deferred: Deferred, slots: Iterable[Slot]) -> None:
        """Other ranks hold the state of ``slots`` from now on, or parts of it."""
        gather = partial(self._whole_state, deferred)
        _state_of(deferred).lies_elsewhere([slot.parameter for slot in slots], gather)

    def _whole_state(self, deferred: Deferred) -> dict[Any, Any]:
        """All entries by parameter, in the order of the optimizer's groups. The user's thread."""
        entries = {
            self._plan.slots[position].parameter: entry
            for position, entry in self.gather(deferred).items()
        }
        groups = deferred.optimizer.param_groups
        return {p: entries[p] for group in groups for p in group["params"] if p in entries}

    def _entries(self, deferred: Deferred) -> dict[int, Any]:
        """Those that this rank owns, by position in the plan."""
        state = deferred.optimizer.state
        entries = {}
        for position, slot in enumerate(self._plan.slots):
            entry, part = dict.get(state, slot.parameter), self._ownerships.parts.get(slot)
            if entry is not None and slot in self._ownerships.own:
                # After `restore` there are whole ones.
                entries[position] = entry if part is None else cut_entry(entry, slot, part.share)
        return entries

    def held(self, optimizer: torch.optim.Optimizer) -> list[HeldEntry]:
        """The live entries of ``optimizer`` that are here; nothing may be outstanding."""
        found = []
        for slot in self._plan.slots:
            entry = dict.get(optimizer.state, slot.parameter)
            if entry is not None and slot in self._ownerships.own:
                part = self._ownerships.parts.get(slot)
                start_at, stop_at = 0, slot.view.numel()
                if part is not None:
                    start_at, stop_at = part.share.start_at, part.share.stop_at
                name = plain_name(slot)
                found.append(HeldEntry(name, entry, slot.view, start_at, stop_at))
        return found

    # -- for other ranks ---------------------------------------------------------------

    def answer(self, index: int, steps: int, loads: int) -> Reply:
        """The entries here of an optimizer after so many steps and loads."""

        def is_complete() -> bool:
            # This rank may be behind by its whole first round.
            return index < len(self._histories) and self._histories[index].is_complete(steps, loads)

        def late() -> SchedulerTimeout:
            return SchedulerTimeout(
                f"rank {self._rank} has not come to step {steps} and {loads} calls of "
                f"load_state_dict() within {self._timeout_s:g} s, and its optimizer's state was "
                "asked for",
                rank=self._rank,
            )

        return Reply(is_complete, partial(self._answer, index, steps, loads), late)

    def _answer(self, index: int, steps: int, loads: int) -> bytes:
        history = self._histories[index]
        if not history.deferred.is_alive:
            raise PluginError(
                f"rank {self._rank} has let go of an optimizer whose state was asked for: keep it "
                "on every rank, or on none"
            )
        with self._reading:
            if history.begun > steps:
                raise PluginError(
                    f"rank {self._rank} has gone on to step {history.begun}, and its optimizer's "
                    f"state was asked for after step {steps}: call state_dict() after step(), not "
                    "between backward() and step()"
                )
            replaced = history.replaced.get(loads)
            return packed(self._entries(history.deferred) if replaced is None else replaced)

    # -- from other ranks --------------------------------------------------------------

    def gather(self, deferred: Deferred) -> dict[int, Any]:
        """All entries of an optimizer, by position in the plan. The user's thread."""
        history = self._history(deferred)
        mine = deferred.parameter_ids()
        owners = {
            share.rank
            for slot in self._plan.slots
            if id(slot.parameter) in mine
            for share in self._ownerships.foreign[slot]
        }
        question = self.number_of(deferred), history.taken, history.loads
        questions = dict.fromkeys(owners, question)
        self._waits_for_ranks()
        found = gathered(
            self._progress,
            self._ask,
            "state",
            questions,
            "the optimizer's state",
            self._plan.slots[0].view.device,
        )
        found[self._rank] = self._entries(deferred)
        return {
            position: whole_entry(slot, shares, [found[share.rank][position] for share in shares])
            for position, slot in enumerate(self._plan.slots)
            if (shares := self._plan.shares(slot))
            and all(position in found.get(share.rank, ()) for share in shares)
        }

    def _complete(
        self, deferred: Deferred, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
    ) -> dict[str, Any]:
        """A hook of ``state_dict()``."""
        index_of: dict[int, int] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                index_of.setdefault(id(parameter), len(index_of))
        state = dict(state_dict["state"])
        for position, entry in self.gather(deferred).items():
            index = index_of.get(id(self._plan.slots[position].parameter))
            if index is not None:
                state[index] = entry
        numbered = {key: state[key] for key in sorted(k for k in state if isinstance(k, int))}
        state_dict["state"] = {**numbered, **state}
        return state_dict

    def restore(self) -> None:
        """Every optimizer gets the entries of all ranks."""
        for history in self._histories:
            if history.deferred.is_alive:
                state = _state_of(history.deferred)
                entries = self._whole_state(history.deferred)
                others = {key: entry for key, entry in dict.items(state) if key not in entries}
                with self._reading:
                    state.restore({**entries, **others})


def _state_of(deferred: Deferred) -> GuardedState:
    """That of its optimizer, guarded if the script has put another one there."""
    deferred.guard()
    state = deferred.optimizer.state
    assert isinstance(state, GuardedState)
    return state
