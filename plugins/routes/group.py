"""A process group of our own, and what its failures mean."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from bytesched.errors import PeerLost, SchedulerTimeout, TransportError

from ..ending import end_soon
from .store import Notes

#: for threads of a broken group to end
PATIENCE_S: Final = 5.0

#: for the last messages to be taken by ranks that are busy
_LEAVE_S: Final = 30.0

#: for the connections of this group to break where those of another one have
_NAMING_S: Final = 0.5

#: a tag of no message
_NEVER_SENT: Final = 1 << 20

#: how long a collective may take before connections are looked at, and again
_LOOKS_EVERY: Final = timedelta(seconds=1)


class _Stopped(RuntimeError):
    """A rank elsewhere has stopped, and left a note."""


class Group:
    """A process group that only a session issues on, and the store behind it.

    Two threads on one Gloo group abort the process, so the user's group is never used.
    """

    def __init__(
        self,
        backend: Any,
        store: distributed_c10d.Store,
        notes: Notes,
        *,
        name: str,
        timeout_s: float,
        members: Sequence[int] | None = None,
    ) -> None:
        self.backend = backend
        self.store = store
        self.rank: int = backend.rank()
        self.size: int = backend.size()
        self._is_gloo: bool = backend.name() == "gloo"
        self.name = name
        self.timeout_s = timeout_s
        #: of every rank, where they are known
        self.hosts: Sequence[str] = ()
        #: for messages: the ranks of the job that these are
        self.members: Sequence[int] = range(self.size) if members is None else members
        self.notes = notes
        #: the reason why this rank stops, which others show beside a broken connection; and theirs
        self.leave_note, self.note = notes.leave, notes.read
        #: the other ranks, with all of which this one is connected; the next one first
        self._others = [(self.rank + d) % self.size for d in range(1, self.size)]
        #: this rank has broken the connections itself
        self.is_aborted = self._closed = False

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        """Begins to send ``tensor``, which is dense, to a rank; returns the work."""
        with _unwatched():
            return self._begun("send", [tensor], peer, tag)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        """Begins to receive from a rank into ``tensor``; returns the work."""
        with _unwatched():
            return self._begun("recv", [tensor], peer, tag)

    def all_reduce(self, tensor: torch.Tensor, key: str = "") -> Any:
        """Begins to sum ``tensor`` over the ranks, in place; returns the work.

        Collectives are paired by their order: the ``key`` names it for others (see `Wire.start`).
        """
        return self._begun("allreduce", [tensor])

    def largest(self, tensor: torch.Tensor) -> Any:
        """Begins to make ``tensor`` the largest of all ranks, in place; returns the work."""
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        return self._begun("allreduce", [tensor], options)

    def all_gather(self, row: torch.Tensor, part: torch.Tensor) -> Any:
        """Begins to fill ``row`` with every rank's ``part``, by rank; returns the work."""
        return self._begun("_allgather_base", row, part)

    def exchange(self, into: torch.Tensor, sent: torch.Tensor) -> Any:
        """Begins to send ``sent`` to the other of two ranks, and to take its; returns the work.

        A collective, unlike `send` and `receive`: its end is seen without a wait.
        """
        into_numels, sent_numels = [0, 0], [0, 0]
        into_numels[1 - self.rank], sent_numels[1 - self.rank] = into.numel(), sent.numel()
        return self.all_to_all(into, sent, into_numels, sent_numels)

    def all_to_all(
        self,
        into: torch.Tensor,
        sent: torch.Tensor,
        into_numels: Sequence[int],
        sent_numels: Sequence[int],
    ) -> Any:
        """Begins to send each rank so many elements of ``sent``, in order, and to take as many.

        Returns the work.
        """
        return self._begun("alltoall_base", into, sent, list(into_numels), list(sent_numels))

    def _begun(self, name: str, *args: Any) -> Any:
        """The work of a call, without what waits for lazy gradients among its arguments.

        Ours are none (see proxies.entries).
        """
        method = getattr(type(self.backend), name)
        return getattr(method, "__wrapped__", method)(self.backend, *args)

    def gather_text(self, key: str, text: str) -> list[str]:
        """Every rank's ``text``, by rank; collective. ``key`` names it where it fails."""
        # Its end shows where zeros follow.
        data = f"{text}.".encode()
        longest = torch.tensor([len(data)], device="cpu")
        self.wait(self.largest(longest), task=key)
        mine = torch.frombuffer(bytearray(data.ljust(int(longest), b"\0")), dtype=torch.uint8)
        theirs = [torch.empty_like(mine) for _ in range(self.size)]
        self.wait(self.backend.allgather([theirs], [mine]), task=key)
        return [bytes(one.tolist()).rstrip(b"\0").decode()[:-1] for one in theirs]

    def broadcast(self, tensors: Iterable[torch.Tensor], *, root: int = 0, task: str) -> None:
        """Gives every rank the values that ``tensors`` have on rank ``root``; collective."""
        options: Any = dist.BroadcastOptions()
        options.rootRank = root
        for tensor in tensors:
            values = tensor.detach()
            dense = values.contiguous()
            self.wait(self.backend.broadcast([dense], options), task=task)
            if dense is not values:
                values.copy_(dense)

    def of_leader(self, number: int) -> int:
        """Rank 0's ``number``, on all ranks; collective."""
        numbers = torch.tensor([number if self.rank == 0 else 0], device="cpu")
        self.wait(self.all_reduce(numbers), "comparing clocks")
        return int(numbers)

    def wait(self, work: Any, task: str = "") -> None:
        """Waits for the end of ``work``, a collective, whose failure is an error of ours."""
        try:
            self.complete(work)
        except RuntimeError as error:
            raise self.error(error, task=task) from error

    def wait_left(self, works: Iterable[Any]) -> None:
        """Returns when ``works`` have ended, or cannot, or after a while; raises nothing.

        Before this rank goes: Gloo sends a message when its receiver takes it, and closing the
        connection before that would look like a death to the other rank.
        """
        deadline_s = time.monotonic() + min(_LEAVE_S, self.timeout_s)
        for work in works:
            left_s = max(deadline_s - time.monotonic(), 0.001)
            with contextlib.suppress(RuntimeError):
                work.wait(timedelta(seconds=left_s))

    def complete(self, work: Any) -> None:
        """Waits for the end of ``work``, a collective; raises what torch raises.

        When a connection breaks, Gloo fails what waits for it, but not an operation that is half
        written or half read, which waits on until it times out. So the connections are looked at
        if it takes long, and whether a rank that is no neighbour has left a note.
        """
        broken: RuntimeError | None = None
        # Every call gives up the GIL, and has to get it back: most chunks need one.
        while self._is_gloo:
            began_s = time.monotonic()
            try:
                work.wait(_LOOKS_EVERY)
                return
            except RuntimeError:
                # What has failed before the limit has ended.
                took_s = time.monotonic() - began_s
                if work.is_completed() or took_s < _LOOKS_EVERY.total_seconds():
                    break
                if broken is not None:
                    # It had time to finish with what had arrived before.
                    raise broken from None
                ring = {(self.rank + 1) % self.size, (self.rank - 1) % self.size}
                broken = self.broken(ring)
                # A rank that is no neighbour may have stopped.
                if broken is None and self.size > 1 + len(ring) and (note := self.note()):
                    broken = _Stopped(note)
        work.wait()

    def broken(self, peers: Iterable[int]) -> RuntimeError | None:
        """What broke a connection to one of ``peers``, if something did. Gloo only; any thread."""
        try:
            for peer in peers:
                # Refused on a broken connection; on a whole one never matched, and harmless.
                with _unwatched():
                    self.backend.recv([torch.empty(1, device="cpu")], peer, _NEVER_SENT)
        except RuntimeError as error:
            # Frames of the call hold the backend, whose threads would live as long as the error.
            return error.with_traceback(None)
        return None

    def lost(self) -> TransportError | None:
        """The error of a connection that is broken, if one is. Any thread."""
        if not self._is_gloo:
            return None
        broken = self.broken(self._others)
        return None if broken is None else self.error(broken)

    def abort(self) -> None:
        """Breaks the connections: what is under way fails at once, here and on every other rank.

        Idempotent, from any thread. What is started afterwards fails as well.
        """
        if self.is_aborted:
            return
        self.is_aborted = True
        if not self._is_gloo:
            _stop(self.backend, "abort")
            return
        # Gloo has no call for it, but a receive that times out closes all its connections. One
        # that fails first, as the other rank goes meanwhile, closes none; nor is there one from
        # a rank whose connection is broken already. So every rank is tried.
        never = torch.empty(1, device="cpu")
        for peer in self._others:
            with contextlib.suppress(RuntimeError), _unwatched():
                work = self.backend.recv([never], peer, _NEVER_SENT)
                work.wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """Ends the group's own threads and connections; nothing must be under way. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if not self._is_gloo:
            if not self.is_aborted:
                _stop(self.backend, "shutdown")
            return
        self.is_aborted = True
        # Gloo's threads end when nothing refers to the backend. They must, before the interpreter
        # does: one that frees the last tensor afterwards finds no interpreter, and aborts.
        held = [self.backend]
        self.backend = None
        end_soon(held.clear, PATIENCE_S)

    def error(self, cause: BaseException, *, task: str = "") -> TransportError:
        """``cause`` as an error of ours: a rank that is likely gone, or a deadline that passed."""
        text = str(cause)
        about: dict[str, Any] = {"task": task, "rank": self.members[self.rank]}
        if isinstance(cause, _Stopped):
            return PeerLost(f"another rank has stopped{text}", **about)
        if is_cut(text):
            peers = self._lost_peers()
            what = f"{self._named(peers)} gone ({text.strip()}); see its own log for the reason"
            return PeerLost(what + self.note(), peers=peers, **about)
        kind: type[TransportError] = TransportError
        what = f"all-reduce failed: {text}"
        if is_late(text):
            kind = SchedulerTimeout
            what = (
                f"no progress within {self.timeout_s:g} s: a peer is stopped, stuck or in other "
                f"code ({text.strip()}); raise timeout_s if it was only slow"
            )
        return kind(what + self.note(), **about)

    def _lost_peers(self) -> list[int]:
        """Ranks of the job whose connections are broken, unless this one broke them itself."""
        if self.is_aborted or not self._is_gloo:
            return []
        deadline_s = time.monotonic() + _NAMING_S
        while True:
            lost = [rank for rank in self._others if self.broken([rank]) is not None]
            if lost or time.monotonic() > deadline_s:
                return [self.members[rank] for rank in lost]
            time.sleep(_NAMING_S / 50)

    def _named(self, peers: Sequence[int]) -> str:
        """``peers`` with their hosts, as the beginning of a sentence."""
        names = [f"rank {peer}" for peer in peers]
        if self.hosts:
            names = [f"rank {peer} on {self.hosts[peer]}" for peer in peers]
        if len(names) == 1:
            return f"{names[0]} is"
        return f"one of {', '.join(names)} is" if names else "another rank is"


def is_cut(reason: str) -> bool:
    """Whether torch, or Horovod, says by ``reason`` that another rank is gone."""
    return any(sign in reason for sign in ("closed by peer", "reset by peer", "Broken pipe"))


def is_late(reason: str) -> bool:
    """Whether torch, or Horovod, says by ``reason`` that a deadline has passed."""
    return any(sign in reason for sign in ("Timed out", "timed out", "timeout", "Timeout"))


@contextlib.contextmanager
def _unwatched() -> Iterator[None]:
    """No profiler sees what is begun: torch would write down its end when the profiler is gone."""
    if not torch._C._autograd._profiler_enabled():
        yield
        return
    torch._C._autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch._C._autograd._enable_record_function(True)


def _stop(backend: Any, how: str) -> None:
    """Calls ``abort`` or ``shutdown``; before torch 2.6 both were ``_shutdown``."""
    getattr(backend, how, getattr(backend, "_shutdown", lambda: None))()
