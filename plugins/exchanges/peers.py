"""The ranks that rows are spread over, and the process group that exchanges use alone.

On the group of the gradients an all-to-all would queue behind all-reduces that were started before.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import astuple, dataclass, fields
from multiprocessing.util import Finalize
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bytesched import urgency
from bytesched.config import Config
from bytesched.errors import MismatchError, PluginError, in_one_line

from ..ending import end_when_gone
from ..routes.group import Group
from ..routes.opening import kind_of, open_group
from .counts import Form, Table
from .messages import Exchanges


@dataclass(eq=False)
class Transfer:
    """Rows on their way in one direction; ``rows`` are complete after `wait`."""

    rows: Tensor
    _end: Callable[[], object] | None

    def wait(self) -> Tensor:
        """The rows, once they are all here. Raises TransportError."""
        end, self._end = self._end, None
        if end is not None:
            end()
        return self.rows


@dataclass(eq=False)
class Layers:
    """What has been made over one group of ranks, in the same order on all of them."""

    made: int = 0
    #: room for what a rank tells the others
    most_counts: int = 0
    #: how often its peers were opened, those in use, and what closes them when the group is gone
    opened: int = 0
    peers: Peers | None = None
    end: Any = None


class Peers:
    """The ranks of one exchange, this one among them."""

    def __init__(self, group: Group, layers: Layers) -> None:
        self._group = group
        self._layers = layers
        layers.most_counts = max(layers.most_counts, 2 * group.size)
        self.rank = group.rank
        self.size = group.size
        is_gloo = group.backend.name() == "gloo"
        #: where what is no row travels
        self._device = torch.device("cpu" if is_gloo else "cuda")
        self._exchanges = Exchanges(group) if is_gloo else None

    def gather(
        self, form: Form, counts: Sequence[int], device: torch.device, *, is_urgent: bool
    ) -> Table:
        """The form and the counts of every rank; collective.

        As many counts as ranks take in both directions, or as a registered layer has, at most.
        """
        # Of one length on all ranks.
        padding = [0] * (self._layers.most_counts - len(counts))
        numbers = [*map(int, astuple(form)), len(counts), *counts, *padding]
        rows: Sequence[Sequence[Any]] = self.gather_numbers(numbers, device, is_urgent=is_urgent)
        at = len(fields(Form))
        given = (tuple(row[at + 1 : at + 1 + row[at]]) for row in rows)
        return Table(tuple(Form(*row[:at]) for row in rows), tuple(given))

    def register(self, counts: int, what: str) -> int:
        """The number of a new layer, from 1, which will give so many counts; collective.

        Raises MismatchError, on all ranks alike, where another rank's layer gives others.
        """
        found = [n for (n,) in self.gather_numbers([counts], self._device, is_urgent=False)]
        other = next((rank for rank, count in enumerate(found) if count != found[0]), None)
        if other is not None:
            raise MismatchError(
                f"the ranks disagree about {what}: rank 0 of the layer has {found[0]}, rank "
                f"{other} has {found[other]}"
            )
        self._layers.made += 1
        self._layers.most_counts = max(self._layers.most_counts, counts)
        return self._layers.made

    def share(self, own: Mapping[str, Tensor], what: str) -> dict[str, Tensor]:
        """Named tensors of all ranks, on this rank's device; collective. ``what`` is for errors."""
        forms = {n: (str(t.dtype).removeprefix("torch."), list(t.shape)) for n, t in own.items()}
        text = json.dumps(forms).encode()
        lengths = [n for (n,) in self.gather_numbers([len(text)], self._device, is_urgent=False)]
        padded = [*text.ljust(max(lengths), b"\0")]
        texts = self.gather_numbers(padded, self._device, is_urgent=False)
        device = next((tensor.device for tensor in own.values()), self._device)
        found: dict[str, Tensor] = {}
        for rank, (theirs_text, length) in enumerate(zip(texts, lengths, strict=True)):
            theirs = {
                name: own[name].detach()
                if rank == self.rank
                else torch.empty(shape, dtype=getattr(torch, dtype), device=device)
                for name, (dtype, shape) in json.loads(bytes(theirs_text[:length])).items()
            }
            self._group.broadcast(theirs.values(), root=rank, task=what)
            found.update(theirs)
        return found

    @contextmanager
    def telling(self, what: str) -> Iterator[None]:
        """Around code of a user's, ``what``: an error in it is told to the ranks that would wait.

        It goes on unchanged here; the others get PeerLost with its words.
        """
        try:
            yield
        except BaseException as error:
            if not self.is_broken:
                self._group.leave_note(f"{what} raised {in_one_line(error)}")
                self._group.abort()
            raise

    def gather_numbers(
        self, numbers: Sequence[int], device: torch.device, *, is_urgent: bool
    ) -> list[list[int]]:
        """The numbers of every rank, by rank; collective, with as many on each."""
        mine = torch.tensor(numbers, dtype=torch.int64, device=device)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        with urgency.urgent("exchange counts") if is_urgent else nullcontext():
            work = self._called("exchange counts", self._group.backend.allgather, [rows], [mine])
            self.complete(work, "exchange counts")
        return [row.tolist() for row in rows]

    def sum_in_place(self, tensor: Tensor, what: str) -> None:
        """Sums ``tensor``, which is dense, over the ranks; collective.

        Raises TransportError, at the latest after the limit of an exchange.
        """
        name = f"{what} over ranks {', '.join(map(str, self._group.members))}"
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        self.complete(self._called(name, self._group.all_reduce, real), name)

    def start(
        self, x: Tensor, send: list[int], receive: list[int], name: str, *, is_urgent: bool
    ) -> Transfer:
        """Begins to send ``send[k]`` rows of ``x`` to each rank k; urgent until its end."""
        sent = x.detach().contiguous()
        # Written on other threads, which are not in the inference mode of this one.
        with torch.inference_mode(mode=False):
            rows = sent.new_empty((sum(receive), *x.shape[1:]))
        section = urgency.begin(name) if is_urgent else None
        try:
            # Gloo's messages are read from and written to memory of the host.
            if self._exchanges is not None and not x.is_cuda:
                # Filled on other threads, of which autograd need not know.
                parts = sent.data.split(send), rows.data.split(receive)
                return Transfer(rows, self._exchanges.begin(name, *parts, section))
            work = self._called(name, self._group.backend.alltoall_base, rows, sent, receive, send)
            # What is computed meanwhile does not wait: the section ends with the transfer.
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
        self._called(name, self._group.complete, work)

    def close(self) -> None:
        """Ends threads and connections."""
        if self._exchanges is not None:
            self._exchanges.close()
        self._group.close()

    @property
    def is_broken(self) -> bool:
        """Whether an error has ended it."""
        return self._group.is_aborted

    def _called(self, name: str, call: Any, *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except RuntimeError as error:
            failed = self._group.error(error, task=name)
            self._group.abort()
            raise failed from error


_LAYERS: weakref.WeakKeyDictionary[dist.ProcessGroup, Layers] = weakref.WeakKeyDictionary()


def peers_of(group: dist.ProcessGroup | None) -> Peers | None:
    """The peers of a user's group; None where there is nobody else. Collective at first.

    None as ``group`` is the default one.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    base = dist.group.WORLD if group is None else group
    if base is not None and not isinstance(base, dist.ProcessGroup):
        raise PluginError("this rank is not in the group whose ranks are to exchange rows")
    if base is None or base.size() == 1:
        return None
    layers = _LAYERS.setdefault(base, Layers())
    if layers.peers is not None and not layers.peers.is_broken:
        return layers.peers
    if layers.peers is not None:
        layers.end.detach()
        layers.peers.close()
    layers.opened += 1
    device, kind = torch.device("cpu"), "gloo"
    if torch.cuda.is_available() and dist.get_backend(base) != "gloo":
        device = torch.device("cuda", torch.cuda.current_device())
        kind = kind_of(base, device)
    name = f"exchange{layers.opened}/rows"
    opened = open_group(base, kind, name=name, timeout_s=Config.load().timeout_s)
    opened.members = dist.get_process_group_ranks(base)
    opened.notes.rank = opened.members[opened.rank]
    peers = layers.peers = Peers(opened, layers)
    layers.end = end_when_gone(base, peers.close)
    if multiprocessing.parent_process() is not None:
        # Children of multiprocessing end without the functions of atexit.
        Finalize(None, _close_all, exitpriority=999)
    return peers


@atexit.register
def _close_all() -> None:
    # Gloo's threads must end before the interpreter does.
    for layers in list(_LAYERS.values()):
        if layers.peers is not None:
            layers.peers.close()
