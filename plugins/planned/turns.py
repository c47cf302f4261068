"""The turns of a model on a device that several jobs share: from forward to the end of backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bytesched.share.tickets import Tickets, device_folder, processor
from bytesched.share.turn import HELD, Turn

from ..proxies.hooks import StayingForwardHook, gate
from .wire import Wire

#: of this process: models on one device have one turn
_turns: weakref.WeakValueDictionary[Path, Turn] = weakref.WeakValueDictionary()


class ModelTurns:
    """When one model takes a turn and gives it back.

    A training forward pass takes it, or a backward pass without one, and the end of the backward
    pass that is reduced gives it back; each further forward pass lets others go first. A forward
    pass without gradients has a turn of its own.
    """

    def __init__(self, turn: Turn, look: Callable[[], None]) -> None:
        self._turn = turn
        self._look = look
        #: what takes the hooks of the model off
        self._undo: list[Callable[[], None]] = []
        #: a forward pass of this model has taken it, and no backward pass has ended since
        self._is_ours = False
        #: so has one without gradients
        self._is_brief = False

    def hook(self, root: nn.Module) -> None:
        """Calls of ``root`` are forward passes."""
        # Behind what DDP does at first, which waits for other ranks.
        inner = root.module if isinstance(root, DistributedDataParallel) else root
        self._undo.append(gate(inner, lambda _: self.forward_begins(), _nothing))
        ended = StayingForwardHook(lambda *_: self.forward_ends())
        self._undo.append(root.register_forward_hook(ended, always_call=True).remove)

    def forward_begins(self) -> None:
        """The model is about to compute; without gradients the turn ends with it."""
        if torch.is_grad_enabled():
            if self._is_ours:
                self._turn.give_back()
            self._turn.take(self._look)
            self._is_ours = True
        elif self._turn not in HELD:
            self._turn.take(self._look)
            self._is_brief = True

    def forward_ends(self) -> None:
        """Also if it has raised."""
        if self._is_brief:
            self._is_brief = False
            self._turn.give_back()

    def backward_begins(self) -> None:
        """The first bucket of a round is there."""
        self._turn.take(self._look)

    def backward_ends(self) -> None:
        """Every gradient of the round is there."""
        self._is_ours = False
        self._turn.give_back()

    def close(self) -> None:
        """The model takes no more. Idempotent."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        self._is_ours = self._is_brief = False
        self._turn.give_back()


def open_turns(
    share: str, device: torch.device, wire: Wire, look: Callable[[], None]
) -> ModelTurns:
    """Those of a model on ``device`` under the name ``share``.

    Args:
        look: called while a turn is awaited; raises what has gone wrong meanwhile.

    Raises `PluginError` if the folder where jobs meet is another user's, or cannot be made.
    """
    folder = device_folder(share, _shared_as(device, wire.rank))
    turn = _turns.get(folder)
    if turn is None:
        tickets = Tickets(folder, f"rank {wire.rank} of {wire.size}")
        queued = None if device.type == "cpu" else partial(_queued, device)
        _turns[folder] = turn = Turn(tickets, timeout_s=wire.timeout_s, queued=queued)
    return ModelTurns(turn, look)


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


def _nothing() -> None:
    """A gate inside compiled code waits for no turn."""
