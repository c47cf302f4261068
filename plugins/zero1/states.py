"""The state of optimizers where every rank holds that of its own parameters alone."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
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
from .checkpoint import HeldEntry, plain_name
from .ownership import Ownership, Piece


class States:
    """Which entries of optimizers' states are here, and the others when somebody asks for them.

    Args:
        slots: all parameters of the model, in registration order.
        ask: what each rank has of the state of an optimizer; others answer when they can.
    """

    def __init__(self, slots: Sequence[Slot], ask: Callable[[int], list[bytes]]) -> None:
        self._slots = slots
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

    def keep(self, deferred: Deferred) -> None:
        """``deferred`` steps: its state is what others ask for, also when it is gone here."""
        number = self.number_of(deferred)
        count = sum(len(group["params"]) for group in deferred.optimizer.param_groups)
        _, before = self._kept[number]
        self._kept[number] = _state_of(deferred), count
        if count != before:
            self._drop_foreign(deferred)

    def number_of(self, deferred: Deferred) -> int:
        """By which ranks know an optimizer."""
        return self.optimizers.index(deferred)

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
        elsewhere = []
        for slot in self._slots:
            parameter = slot.parameter
            if id(parameter) not in mine:
                continue
            own = ownership.own(parameter)
            if own is None or ownership.is_cut(parameter):
                elsewhere.append(parameter)
            entry = dict.get(state, parameter)
            if entry is None:
                continue
            if own is None:
                dict.pop(state, parameter, None)
            elif ownership.is_cut(parameter):
                dict.__setitem__(state, parameter, _cut(entry, slot, own))
        state.lies_elsewhere(elsewhere, partial(self._whole_state, deferred))

    def _entries(self, deferred: Deferred) -> dict[int, Any]:
        """Those that this rank owns, by position in the model."""
        if (ownership := self.ownership) is None:
            return {}
        state, _ = self._kept[self.number_of(deferred)]
        if deferred.is_alive:
            # It may have been loaded, or replaced, since the last step.
            state = _state_of(deferred)
        return {
            # After `restore` there are whole ones.
            position: _cut(entry, slot, own) if ownership.is_cut(slot.parameter) else dict(entry)
            for position, slot in enumerate(self._slots)
            if (entry := dict.get(state, slot.parameter)) is not None
            and (own := ownership.own(slot.parameter)) is not None
        }

    def held(self, optimizer: torch.optim.Optimizer) -> list[HeldEntry]:
        """The live entries of ``optimizer`` that are here; nothing may be outstanding."""
        if self.ownership is None:
            raise PluginError("no rank owns anything before the first backward pass")
        found = []
        for slot in self._slots:
            entry = dict.get(optimizer.state, slot.parameter)
            own = self.ownership.own(slot.parameter)
            if entry is not None and own is not None:
                found.append(
                    HeldEntry(plain_name(slot.name), entry, slot.parameter, own.start, own.stop)
                )
        return found

    # -- other ranks -------------------------------------------------------------------

    def answer(self, number: int) -> bytes:
        """The entries here of an optimizer, for another rank."""
        buffer = io.BytesIO()
        torch.save(self._entries(self.optimizers[number]), buffer)
        return buffer.getvalue()

    def _gather(self, deferred: Deferred) -> dict[int, Any]:
        """All entries of an optimizer, by position in the model."""
        device = self._slots[0].parameter.device
        found = [_unpacked(answer, device) for answer in self._ask(self.number_of(deferred))]
        assert self.ownership is not None
        ownership = self.ownership
        return {
            position: _whole(slot, pieces, [found[piece.rank][position] for piece in pieces])
            for position, slot in enumerate(self._slots)
            if (pieces := ownership.of(slot.parameter))
            and all(position in found[piece.rank] for piece in pieces)
        }

    def _whole_state(self, deferred: Deferred) -> dict[Any, Any]:
        """All entries by parameter, in the order of the optimizer's groups."""
        entries = {
            self._slots[position].parameter: entry
            for position, entry in self._gather(deferred).items()
        }
        groups = deferred.optimizer.param_groups
        return {p: entries[p] for group in groups for p in group["params"] if p in entries}

    def _complete(
        self, deferred: Deferred, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
    ) -> dict[str, Any]:
        """A hook of ``state_dict()``."""
        if self.ownership is None:
            return state_dict
        index_of: dict[int, int] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                index_of.setdefault(id(parameter), len(index_of))
        state = dict(state_dict["state"])
        for position, entry in self._gather(deferred).items():
            index = index_of.get(id(self._slots[position].parameter))
            if index is not None:
                state[index] = entry
        numbered = {key: state[key] for key in sorted(k for k in state if isinstance(k, int))}
        state_dict["state"] = {**numbered, **state}
        return state_dict

    def restore(self) -> None:
        """Every optimizer gets the entries of all ranks."""
        for deferred in self.optimizers if self.ownership is not None else ():
            if not deferred.is_alive:
                # Others may have it still, and ask.
                self._ask(self.number_of(deferred))
                continue
            state, entries = _state_of(deferred), self._whole_state(deferred)
            others = {key: entry for key, entry in dict.items(state) if key not in entries}
            state.restore({**entries, **others})
        self.close()

    def __repr__(self) -> str:
        return f"<States of {len(self.optimizers)} optimizers>"


def _state_of(deferred: Deferred) -> GuardedState:
    """That of its optimizer, guarded if the script has put another one there."""
    deferred.guard()
    state = deferred.optimizer.state
    assert isinstance(state, GuardedState)
    return state


def _cut(entry: dict[str, Any], slot: Slot, piece: Piece) -> dict[str, Any]:
    """Of the state of a whole parameter, that of one piece; of such a piece, itself."""
    parameter = slot.parameter
    return {
        name: elements(value, parameter, piece.start, piece.stop).clone()
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape
        else value
        for name, value in entry.items()
    }


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
