"""The ranks that experts are spread over, and the process group that exchanges use alone.

On the group of the gradients an all-to-all would queue behind all-reduces that were started before.
"""

from __future__ import annotations

import atexit
import multiprocessing
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from multiprocessing.util import Finalize
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from bytesched import urgency
from bytesched.config import Config
from bytesched.errors import TransportError

from ..routes.groups.group import Group
from ..routes.groups.opening import kind_of, open_group
from .counts import Call, Form, Table
from .messages import Exchanges

__all__ = ["Peers", "Transfer", "new_layer", "peers_of"]

#: before the counts of a row: how many there are, and the form
_HEAD_NUMBERS: Final = 1 + len(Form(Call.EXCHANGE).row())


class Transfer:
    """Rows on their way in one direction; ``rows`` are complete after `wait`.

    Args:
        end: waits for them, once.
    """

    def __init__(self, rows: Tensor, end: Callable[[], None]) -> None:
        self.rows = rows
        self._end: Callable[[], None] | None = end

    def wait(self) -> Tensor:
        """The rows, once they are all here. Raises TransportError."""
        end, self._end = self._end, None
        if end is not None:
            end()
        return self.rows


class Peers:
    """The ranks of one exchange, this one among them."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.rank = group.rank
        self.size = group.size
        self._exchanges = Exchanges(group) if group.backend.name() == "gloo" else None
        #: that rows of `gather` have room for, the same on all ranks
        self._most_counts = 2 * self.size

    def gather(
        self, form: Form, counts: Sequence[int], device: torch.device, *, is_urgent: bool
    ) -> Table:
        """The form and the counts of every rank; collective, with any number of counts on each.

        All ranks send rows of one length, each with its own number of counts. Where one has more
        than fit, all see that, and gather once more; from then on rows are as long as that.
        """
        while True:
            mine = [len(counts), *form.row(), *counts[: self._most_counts]]
            mine += [0] * (self._row_numbers - len(mine))
            with urgency.urgent("moe counts") if is_urgent else nullcontext():
                rows = self._gathered(mine, device)
            most = max(row[0] for row in rows)
            if most <= self._most_counts:
                break
            self._most_counts = most
        return Table(
            tuple(Form.read(row[1:_HEAD_NUMBERS]) for row in rows),
            tuple(tuple(row[_HEAD_NUMBERS : _HEAD_NUMBERS + row[0]]) for row in rows),
        )

    @property
    def _row_numbers(self) -> int:
        return _HEAD_NUMBERS + self._most_counts

    def _gathered(self, numbers: Sequence[int], device: torch.device) -> list[list[int]]:
        mine = torch.tensor(numbers, dtype=torch.int64, device=device)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        work = self._issue("moe counts", self._group.backend.allgather, [rows], [mine])
        self.complete(work, "moe counts")
        return [row.tolist() for row in rows]

    def start(
        self, x: Tensor, send: list[int], receive: list[int], name: str, *, is_urgent: bool
    ) -> Transfer:
        """Begins to send ``send[k]`` rows of ``x`` to each rank k; urgent until its end."""
        sent = x.detach().contiguous()
        with torch.inference_mode(False):
            # Filled where that mode is off.
            rows = sent.new_empty((sum(receive), *x.shape[1:]))
        section = urgency.begin(name) if is_urgent else None
        try:
            if self._exchanges is not None:
                # Filled on other threads, of which autograd need not know.
                parts = sent.data.split(send), rows.data.split(receive)
                task = self._exchanges.begin(name, *parts, section)
                return Transfer(rows, partial(self._exchanges.wait, task))
            work = self._issue(name, self._group.backend.alltoall_base, rows, sent, receive, send)
            # Where experts compute meanwhile, nobody waits: the section ends with the transfer.
            if section is not None:
                work.get_future().add_done_callback(lambda _: section.end())
        except BaseException:
            if section is not None:
                section.end()
            raise
        # Until its end, it reads what is sent.
        return Transfer(rows, lambda: self.complete(work, name, sent))

    def complete(self, work: Any, name: str, *_sent: Tensor) -> None:
        """Waits for ``work``; an error ends the exchange on the other ranks as well."""
        try:
            self._group.complete(work)
        except RuntimeError as error:
            raise self._failed(error, name) from error

    def close(self) -> None:
        """Ends threads and connections."""
        if self._exchanges is not None:
            self._exchanges.close()
        self._group.close()

    @property
    def is_broken(self) -> bool:
        """Whether an error has ended it."""
        return self._group.is_aborted

    def _issue(self, name: str, collective: Any, *arguments: Any) -> Any:
        try:
            return collective(*arguments)
        except RuntimeError as error:
            raise self._failed(error, name) from error

    def _failed(self, cause: RuntimeError, name: str) -> TransportError:
        error = self._group.error(cause, task=name)
        self._group.abort()
        return error

    def __repr__(self) -> str:
        return f"<Peers rank {self.rank} of {self.size}>"


_PEERS: weakref.WeakKeyDictionary[dist.ProcessGroup, Peers] = weakref.WeakKeyDictionary()
_OPENED: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
_LAYERS: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def new_layer(group: dist.ProcessGroup | None) -> int:
    """The number of a new layer among those over a user's group, from 1: the same on all ranks."""
    base = _base(group)
    if base is None:
        return 1
    number = _LAYERS[base] = _LAYERS.get(base, 0) + 1
    return number


def peers_of(group: dist.ProcessGroup | None) -> Peers | None:
    """The peers of a user's group; None where there is nobody else. Collective at first.

    None as ``group`` is the default one.
    """
    base = _base(group)
    if base is None:
        return None
    peers = _PEERS.get(base)
    if peers is None or peers.is_broken:
        number = _OPENED[base] = _OPENED.get(base, 0) + 1
        device = torch.device("cpu")
        kind = "gloo"
        if torch.cuda.is_available() and dist.get_backend(base) != "gloo":
            device = torch.device("cuda", torch.cuda.current_device())
            kind = kind_of(base, device)
        opened = open_group(
            base, kind, name=f"moe{number}/exchange", timeout_s=Config.load().timeout_s
        )
        opened.members = dist.get_process_group_ranks(base)
        peers = _PEERS[base] = Peers(opened)
        if multiprocessing.parent_process() is not None:
            # Children of multiprocessing end without the functions of atexit.
            Finalize(None, _close_all, exitpriority=999)
    return peers


def _base(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The user's group, or the default one; None where there is nobody else."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    base = dist.group.WORLD if group is None else group
    return None if base is None or base.size() == 1 else base


@atexit.register
def _close_all() -> None:
    # Gloo's threads must end before the interpreter does.
    for peers in list(_PEERS.values()):
        peers.close()
