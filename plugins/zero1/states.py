"""The state of optimizers where every rank holds that of its own parameters alone."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.serialization import default_restore_location
from torch.utils.hooks import RemovableHandle

from bytesched.errors import PluginError

from ..layout import elements
from ..planned.bundles import Slot
from ..update.deferred import Deferred
from ..update.optimizer_state import GuardedState
from .ownership import Ownership, Piece


class States:
    """Which entries of optimizers' states are here, and the others when somebody asks for them.

    Args:
        slots: all parameters of the model, in registration order.
        ask: what each rank has of the state of an optimizer; others answer when they can.
    """

    def __init__(self, slots: Sequence[Slot], ask: Callable[[int], list[bytes]]) -> None:
        self.slots = slots
        self._ask = ask
        #: who owns what, once that is dealt
        self.ownership: Ownership | None = None
        #: in the order in which they were wrapped, by which ranks know them
        self.optimizers: list[Deferred] = []
        #: of each, which other ranks may ask for when the script has let go of it here; and how
        #: many parameters it had
        self._kept: list[tuple[GuardedState, int]] = []
        self._handles: list[RemovableHandle] = []

    def introduce(self, deferred: Deferred) -> None:
        """``deferred`` is one of the session's optimizers from now on."""
        optimizer = deferred.optimizer
        self._handles += [
            optimizer.register_state_dict_pre_hook(lambda _: _state_of(deferred).packs()),
            optimizer.register_state_dict_post_hook(
                partial(self._complete, deferred), prepend=True
            ),
            optimizer.register_load_state_dict_post_hook(lambda _: self._drop_foreign(deferred)),
        ]
        self.optimizers.append(deferred)
        self._kept.append((_state_of(deferred), 0))

    def keep(self, deferred: Deferred) -> int:
        """``deferred`` steps: its state is what others ask for, also when it is gone here.

        Returns by which number ranks know it.
        """
        number = self.optimizers.index(deferred)
        count = sum(len(group["params"]) for group in deferred.optimizer.param_groups)
        _, before = self._kept[number]
        self._kept[number] = _state_of(deferred), count
        if count != before:
            self._drop_foreign(deferred)
        return number

    def dealt(self, ownership: Ownership) -> None:
        """Parameters have owners now: what others own of states is let go of."""
        self.ownership = ownership
        for deferred in self.optimizers:
            if deferred.is_alive:
                self._drop_foreign(deferred)

    def close(self) -> None:
        """Takes its hooks off."""
        for handle in self._handles:
            handle.remove()

    # -- here --------------------------------------------------------------------------

    def _drop_foreign(self, deferred: Deferred) -> None:
        """What other ranks hold of the state is let go of."""
        if (ownership := self.ownership) is None:
            return
        state = _state_of(deferred)
        mine = deferred.parameter_ids()
        slots = [slot for slot in self.slots if id(slot.parameter) in mine]
        for slot in slots:
            own = ownership.own(slot.parameter)
            if own is None:
                dict.pop(state, slot.parameter, None)
            elif (entry := dict.get(state, slot.parameter)) is not None:
                dict.__setitem__(state, slot.parameter, self._cut(entry, slot, own))
        elsewhere = [s.parameter for s in slots if not ownership.is_whole_here(s.parameter)]
        state.lies_elsewhere(elsewhere, partial(self._gather, deferred))

    def _cut(self, entry: dict[str, Any], slot: Slot, piece: Piece) -> dict[str, Any]:
        """Of the state of a whole parameter, that of one piece; of such a piece, itself."""
        parameter = slot.parameter
        assert self.ownership is not None
        if not self.ownership.is_cut(parameter):
            return entry
        return {
            name: elements(value, parameter, piece.start, piece.stop).clone()
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape
            else value
            for name, value in entry.items()
        }

    def here(self, state: dict[Any, Any]) -> Iterator[tuple[Slot, Piece, dict[str, Any]]]:
        """The live entries of an optimizer's ``state`` that this rank owns; none may be owed."""
        if self.ownership is None:
            return
        for slot in self.slots:
            entry, own = dict.get(state, slot.parameter), self.ownership.own(slot.parameter)
            if entry is not None and own is not None:
                yield slot, own, entry

    # -- other ranks -------------------------------------------------------------------

    def answer(self, number: int) -> bytes:
        """The entries here of an optimizer, for another rank."""
        deferred, (state, _) = self.optimizers[number], self._kept[number]
        if deferred.is_alive:
            # It may have been loaded, or replaced, since the last step.
            state = _state_of(deferred)
        here = self.here(state)
        buffer = io.BytesIO()
        # After `restore` there are whole ones.
        torch.save({s.name: dict(self._cut(entry, s, own)) for s, own, entry in here}, buffer)
        return buffer.getvalue()

    def _gather(self, deferred: Deferred) -> dict[Any, Any]:
        """All entries of an optimizer, by parameter, in the order of its groups; collective."""
        device = self.slots[0].parameter.device
        found = [_unpacked(answer, device) for answer in self._ask(self.optimizers.index(deferred))]
        assert self.ownership is not None
        whole = {}
        for slot in self.slots:
            pieces = self.ownership.of(slot.parameter)
            entries = [found[piece.rank].get(slot.name) for piece in pieces]
            if None not in entries:
                whole[slot.parameter] = _whole(slot, pieces, entries)
        groups = deferred.optimizer.param_groups
        return {p: whole[p] for group in groups for p in group["params"] if p in whole}

    def _complete(
        self, deferred: Deferred, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
    ) -> dict[str, Any]:
        """A hook of ``state_dict()``."""
        if self.ownership is None:
            return state_dict
        index_of: dict[Any, int] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                index_of.setdefault(parameter, len(index_of))
        # Whatever this rank has: others may lack something, and ask.
        whole = {index_of[p]: entry for p, entry in self._gather(deferred).items()}
        state = {**state_dict["state"], **whole}
        numbered = {key: state[key] for key in sorted(k for k in state if isinstance(k, int))}
        state_dict["state"] = {**numbered, **state}
        return state_dict

    def restore(self) -> None:
        """Every optimizer gets the entries of all ranks."""
        for deferred in self.optimizers if self.ownership is not None else ():
            if not deferred.is_alive:
                # Others may have it still, and ask.
                self._ask(self.optimizers.index(deferred))
                continue
            state, entries = _state_of(deferred), self._gather(deferred)
            others = {key: entry for key, entry in dict.items(state) if key not in entries}
            state.restore({**entries, **others})
        self.close()


def _state_of(deferred: Deferred) -> GuardedState:
    """That of its optimizer, guarded if the script has put another one there."""
    deferred.guard()
    state = deferred.optimizer.state
    assert isinstance(state, GuardedState)
    return state


def _whole(
    slot: Slot, pieces: Sequence[Piece], entries: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """The state of a whole parameter, from those of its pieces, in their order."""
    if len(pieces) == 1:
        return entries[0]
    whole = dict(entries[0])
    for name, value in entries[0].items():
        if isinstance(value, torch.Tensor) and value.shape == (pieces[0].numel,):
            made = torch.empty_like(
                slot.parameter, dtype=value.dtype, device=value.device, requires_grad=False
            )
            flat = elements(made, made, 0, made.numel())
            torch.cat([entry[name] for entry in entries], out=flat)
            whole[name] = made
    return whole


def _unpacked(content: bytes, device: torch.device) -> Any:
    """What another rank has packed; what is not on the CPU there, on ``device``.

    Nothing of it is executed: raises PluginError for anything but tensors and plain values.
    """

    def here(storage: Any, location: str) -> Any:
        # Of a GPU, the number is another rank's.
        return default_restore_location(storage, "cpu" if location == "cpu" else str(device))

    try:
        return torch.load(io.BytesIO(content), map_location=here, weights_only=True)
    except pickle.UnpicklingError as error:
        raise PluginError(
            "another rank's state contains values other than tensors, numbers, texts and "
            "containers of them, which are not accepted from a network "
            f"({str(error).splitlines()[0]}); with shard=True an optimizer's state must consist "
            "of those"
        ) from error
