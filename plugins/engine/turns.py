"""The turns of a model on a device that several jobs share: from forward to the end of backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bytesched.share.meeting import device_folder, processor
from bytesched.share.tickets import Tickets
from bytesched.share.turn import HELD, Turn

from ..dependency.context import Context

__all__ = ["ModelTurns", "open_turns"]

#: of this process: models on one device have one turn
_turns: weakref.WeakValueDictionary[Path, Turn] = weakref.WeakValueDictionary()


class ModelTurns:
    """When one model takes a turn and gives it back.

    A training forward pass takes it, or a backward pass without one, and the end of the backward
    pass that is reduced gives it back; each further forward pass lets others go first. A forward
    pass without gradients has a turn of its own.
    """

    def __init__(self, turn: Turn, context: Context) -> None:
        self._turn = turn
        self._look = context.progress.check
        #: a forward pass of this model has taken it, and no backward pass has ended since
        self._is_ours = False
        #: so has one without gradients
        self._is_brief = False

    def forward_begins(self) -> None:
        """The model is about to compute; with gradients, if this is to be a turn."""
        if torch.is_grad_enabled():
            if self._is_ours:
                self._turn.give_back()
            self._turn.take(self._look)
            self._is_ours = True

    def brief_forward_begins(self) -> None:
        """The same without gradients: at the end of it the turn is over."""
        if self._turn not in HELD:
            self._turn.take(self._look)
            self._is_brief = True

    def forward_ends(self) -> None:
        """Also if it has raised."""
        if self._is_brief:
            self._is_brief = False
            self._turn.give_back()

    def backward_begins(self) -> None:
        """The first gradient of a round is there."""
        self._turn.take(self._look)

    def backward_ends(self) -> None:
        """Every gradient of the round is there."""
        self._is_ours = False
        self._turn.give_back()

    def close(self) -> None:
        """The model takes no more."""
        self._is_ours = self._is_brief = False
        self._turn.give_back()


def open_turns(share: str, device: torch.device, context: Context) -> ModelTurns:
    """Those of a model on ``device`` under the name ``share``.

    Raises `PluginError` if the folder where jobs meet is another user's, or cannot be made.
    """
    backend = context.backend
    folder = device_folder(share, _shared_as(device, backend.rank))
    turn = _turns.get(folder)
    if turn is None:
        tickets = Tickets(folder, f"rank {backend.rank} of {backend.size}")
        queued = None if device.type == "cpu" else partial(_queued, device)
        _turns[folder] = turn = Turn(tickets, timeout_s=backend.timeout_s, queued=queued)
    return ModelTurns(turn, context)


def _queued(device: torch.device) -> Callable[[], bool]:
    """What tells whether all is computed that the current stream has queued by now."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event.query


def _shared_as(device: torch.device, rank: int) -> str:
    """What jobs that compute on ``device`` call it alike."""
    if device.type == "cpu":
        return processor(rank)
    properties: Any = torch.cuda.get_device_properties(device)
    return f"{device.type}-{getattr(properties, 'uuid', device.index)}"
