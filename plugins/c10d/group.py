"""torch.distributed: process groups of our own, and what their failures mean."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from bytesched.errors import (
    PeerLost,
    PluginError,
    SchedulerTimeout,
    TransportError,
    in_one_line,
)
from bytesched.plugins.c10d.keys import await_keys
from bytesched.plugins.c10d.notes import Notes

__all__ = ["Group", "closed_on_error", "open_gloo", "open_group", "store_of"]

#: for threads of a broken group to end
_PATIENCE_S: Final = 5.0

#: a tag of no message
_NEVER_SENT: Final = 1 << 20

#: how long a collective may take before connections are looked at, and again
_LOOKS_EVERY: Final = timedelta(seconds=1)


class Group:
    """A process group that nobody else issues on, and the store behind it.

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
    ) -> None:
        self.backend = backend
        self.store = store
        self.rank: int = backend.rank()
        self.size: int = backend.size()
        self.name = name
        self.timeout_s = timeout_s
        self._notes = notes
        self._aborted = self._closed = False

    def gather_text(self, key: str, text: str) -> list[str]:
        """Every rank's ``text``, by rank, through the store; raises if a rank is lost."""
        self.store.set(f"{key}/{self.rank}", text)
        texts = []
        for rank in range(self.size):
            try:
                await_keys(self.store, [f"{key}/{rank}"], self.timeout_s, self.lost)
            except RuntimeError as error:
                raise SchedulerTimeout(
                    f"rank {rank} did not arrive at {self.name!r} ({key}) within "
                    f"{self.timeout_s:g} s; does every rank make the same calls of bytesched?",
                    rank=self.rank,
                ) from error
            texts.append(self.store.get(f"{key}/{rank}").decode())
        return texts

    def clock_offset_ns(self) -> int:
        """What must be added to this host's wall clock to read rank 0's; collective."""
        for _ in range(3):
            # The last one ends at nearly the same moment everywhere.
            self.wait(
                self.backend.allreduce([torch.zeros(1, device="cpu")]), task="comparing clocks"
            )
        mine_ns = time.time_ns()
        leaders = torch.tensor([mine_ns if self.rank == 0 else 0], device="cpu")
        self.wait(self.backend.allreduce([leaders]), task="comparing clocks")
        return int(leaders.item()) - mine_ns

    def leave_note(self, text: str) -> None:
        """Says why this rank stops, for the others to find next to their broken connection."""
        self._notes.leave(text)

    def note(self) -> str:
        """What another rank said when it stopped, or nothing."""
        return self._notes.read()

    def wait(self, work: Any, *, task: str = "") -> None:
        """Waits for the end of ``work``, a collective, whose failure is an error of ours."""
        try:
            self.complete(work)
        except RuntimeError as error:
            raise self.error(error, task=task) from error

    def wait_message(self, work: Any, *, task: str = "") -> None:
        """Waits for the end of ``work``, a send or a receive, whose failure is an error of ours."""
        try:
            work.wait()
        except RuntimeError as error:
            raise self.error(error, task=task) from error

    def complete(self, work: Any) -> None:
        """Waits for the end of ``work``, a collective; raises what torch raises.

        When a connection breaks, Gloo tells those who wait for it, but not an operation that is
        half written or half read, which waits on until it times out. So we look at the connections
        ourselves if it takes long.
        """
        broken: RuntimeError | None = None
        while self.backend.name() == "gloo" and not work.is_completed():
            try:
                work.wait(_LOOKS_EVERY)
            except RuntimeError:
                if work.is_completed():
                    break
                if broken is not None:
                    # It had time to finish with what had arrived before.
                    raise broken from None
                ring = {(self.rank + 1) % self.size, (self.rank - 1) % self.size}
                broken = self.broken(ring)
        work.wait()

    def broken(self, peers: Iterable[int]) -> RuntimeError | None:
        """What broke a connection to one of ``peers``, if something did. Gloo only; any thread."""
        try:
            for peer in peers:
                # Refused on a broken connection; on a whole one never matched, and harmless.
                self.backend.recv([torch.empty(1, device="cpu")], peer, _NEVER_SENT)
        except RuntimeError as error:
            return error
        return None

    def lost(self) -> TransportError | None:
        """The error of a connection to any rank that is broken, if one is. Any thread."""
        if self.backend.name() != "gloo":
            return None
        broken = self.broken(rank for rank in range(self.size) if rank != self.rank)
        return None if broken is None else self.error(broken)

    def abort(self) -> None:
        """Breaks the connections: what is under way fails at once, here and on every other rank.

        Idempotent, from any thread. What is started afterwards fails as well.
        """
        if self._aborted:
            return
        self._aborted = True
        if self.backend.name() != "gloo":
            _stop(self.backend, "abort")
            return
        # Gloo has no call for it, but a receive that times out closes all its connections.
        never = torch.empty(1, device="cpu")
        with contextlib.suppress(RuntimeError):
            peer = (self.rank + 1) % self.size
            self.backend.recv([never], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """Ends the group's own threads and connections; nothing must be under way. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self.backend.name() != "gloo":
            if not self._aborted:
                _stop(self.backend, "shutdown")
            return
        self._aborted = True
        # Gloo's threads end when nobody holds the backend. They must, before the interpreter
        # does: one that lets go of the last tensor later finds no interpreter, and aborts.
        held = [self.backend]
        self.backend = None
        ending = threading.Thread(target=held.clear, name="bytesched-ending", daemon=True)
        ending.start()
        ending.join(_PATIENCE_S)

    def error(self, cause: BaseException, *, task: str = "", story: str = "") -> TransportError:
        """``cause`` as an error of ours: who is likely gone, or what outlived its deadline."""
        text = str(cause)
        kind: type[TransportError] = TransportError
        what = f"all-reduce failed: {text}"
        if any(sign in text for sign in ("Timed out", "timed out", "timeout", "Timeout")):
            kind = SchedulerTimeout
            what = (
                f"no progress within {self.timeout_s:g} s: a peer is stopped, stuck or in other "
                f"code ({text.strip()}); raise timeout_s if it was only slow"
            )
        elif any(sign in text for sign in ("closed by peer", "reset by peer", "Broken pipe")):
            kind = PeerLost
            what = f"another rank is gone ({text.strip()}); see its own log for the reason"
        return kind(what + self.note(), task=task, rank=self.rank, story=story.splitlines())


@contextlib.contextmanager
def closed_on_error(*groups: Group) -> Iterator[None]:
    """Around what is done with new groups: an error is told to the other ranks, and closes them."""
    try:
        yield
    except BaseException as error:
        for group in groups:
            if not isinstance(error, PeerLost):
                group.leave_note(in_one_line(error))
            group.abort()
            group.close()
        raise


def _stop(backend: Any, how: str) -> None:
    """Calls ``abort`` or ``shutdown``; before torch 2.6 both were ``_shutdown``."""
    getattr(backend, how, getattr(backend, "_shutdown", lambda: None))()


def store_of(base: dist.ProcessGroup) -> distributed_c10d.Store:
    """The store of a process group of the user's. Raises PluginError if there is none."""
    entry = distributed_c10d._world.pg_map.get(base)
    if entry is None:
        raise PluginError("torch.distributed is not initialized: call init_process_group first")
    return entry[1]


def open_group(base: dist.ProcessGroup, kind: str, *, name: str, timeout_s: float) -> Group:
    """A group of our own over the ranks of ``base``; collective.

    Args:
        base: the user's group; only its store is used.
        kind: the backend, "gloo" or "nccl".
        name: "session/purpose", the same on all ranks, unique in this job.
        timeout_s: of every operation on it.
    """
    root = store_of(base)
    # Not through new_group: it must outlive destroy_process_group for the last step, and ranks
    # outside of ``base`` would have to call it, too.
    store = distributed_c10d.PrefixStore(f"bytesched/{name}", root)
    if kind == "gloo":
        return open_gloo(store, root, base.rank(), base.size(), name=name, timeout_s=timeout_s)
    if kind != "nccl":
        raise PluginError(f"backend {kind!r} is not supported; gloo and nccl are")
    options: Any = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    # Its watchdog ends the process; our own deadline ends in an error, so that comes first.
    options._timeout = 2 * timedelta(seconds=timeout_s)
    options.global_ranks_in_group = distributed_c10d.get_process_group_ranks(base)
    options.group_name = f"bytesched/{name}"
    backend = dist.ProcessGroupNCCL(store, base.rank(), base.size(), options)
    notes = _notes(root, name, base.rank())
    return Group(backend, store, notes, name=name, timeout_s=timeout_s)


def open_gloo(
    store: distributed_c10d.Store,
    root: distributed_c10d.Store,
    rank: int,
    size: int,
    *,
    name: str,
    timeout_s: float,
) -> Group:
    """A group of ``size`` ranks that connect by ``store``; their notes are in ``root``.

    Raises `SchedulerTimeout` if one of them does not come, or what the store raises.
    """
    try:
        backend: Any = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise SchedulerTimeout(
            f"the ranks could not connect for {name!r} within {timeout_s:g} s ({error}); "
            "does every rank make the same calls of bytesched?",
            rank=rank,
        ) from error
    return Group(backend, store, _notes(root, name, rank), name=name, timeout_s=timeout_s)


def _notes(root: distributed_c10d.Store, name: str, rank: int) -> Notes:
    """Those of the session that a group is named after."""
    session, _, _ = name.partition("/")
    return Notes(distributed_c10d.PrefixStore(f"bytesched/{session}", root), rank)
