"""Process groups of our own over the ranks of a user's group: opened, and closed on errors."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from string import digits
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from bytesched.environment import gloo_interfaces
from bytesched.errors import PeerLost, PluginError, SchedulerTimeout, in_one_line

from .group import Group, is_cut
from .store import Notes

#: by the process that has their threads, which a forked child has not; interfaces; and use
_devices: dict[tuple[int, tuple[str, ...], str], list[Any]] = {}
_lock = threading.Lock()


def shared_devices(use: str) -> list[Any]:
    """The devices of this process for groups of one use, one for each interface that Gloo is given.

    Groups share the thread that reads and writes sockets, and the port that ranks connect to. What
    one of them has under way delays the others of the same use.
    """
    interfaces = tuple(gloo_interfaces())
    key = os.getpid(), interfaces, use
    gloo: Any = dist.ProcessGroupGloo
    # Whatever TORCH_GLOO_LAZY_INIT says of the script's groups: where two ranks connect only when
    # they first send, a look at a rank that died before blocks until its connection times out.
    knows_late = "lazy_init" in (gloo.create_default_device.__doc__ or "")
    late = {"lazy_init": False} if knows_late else {}
    with _lock:
        if key not in _devices:
            named = [gloo.create_device(interface=name, **late) for name in interfaces]
            _devices[key] = named or [gloo.create_default_device(**late)]
        return _devices[key]


#: purposes of groups that carry little, one thing at a time
_SHORT: Final = frozenset({"buffers", "control", "statements"})


@contextlib.contextmanager
def closed_on_error(group: Group) -> Iterator[None]:
    """Around what is done with a new group: an error leaves a note, and closes it."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, PeerLost):
            group.leave_note(in_one_line(error))
        group.abort()
        group.close()
        raise


def store_of(base: dist.ProcessGroup) -> distributed_c10d.Store:
    """The store of a process group of the user's. Raises PluginError if there is none."""
    entry = distributed_c10d._world.pg_map.get(base)
    if entry is None:
        raise PluginError("torch.distributed is not initialized: call init_process_group first")
    return entry[1]


def kind_of(base: dist.ProcessGroup, device: torch.device) -> str:
    """The backend that carries tensors of ``device`` in a user's group: "gloo", "nccl" or another.

    Since 2.15, torch has several engines of NCCL (nccl2, nccl-lazy, nccl-legacy): all are "nccl".
    """
    name: str = base._get_backend(device).name()
    return "nccl" if name.startswith("nccl") else name


def timeout_of(base: dist.ProcessGroup, device: torch.device) -> float | None:
    """How long a collective of a user's group may take, in seconds; None: not known."""
    options = getattr(base._get_backend(device), "options", None)
    timeout: timedelta | None = getattr(options, "_timeout", None)
    return None if timeout is None else timeout.total_seconds()


def open_group(
    base: dist.ProcessGroup,
    kind: str,
    *,
    name: str,
    timeout_s: float,
    members: Sequence[int] | None = None,
) -> Group:
    """A group of our own over the ranks of ``base``, or over some of them; collective among these.

    Args:
        base: the user's group; only its store is used.
        kind: the backend, "gloo" or "nccl".
        name: "session/purpose", the same on these ranks, unique in this job; a number may follow.
        timeout_s: of every operation on it.
        members: ranks of ``base``, of which this is one; None: all.
    """
    root = store_of(base)
    members = range(base.size()) if members is None else members
    # Not through new_group: it must outlive destroy_process_group for the last step, and ranks
    # outside of ``base`` would have to call it, too.
    store = distributed_c10d.PrefixStore(f"bytesched/{name}", root)
    rank, size = members.index(base.rank()), len(members)
    if kind == "gloo":
        return open_gloo(store, root, rank, size, name=name, timeout_s=timeout_s, members=members)
    if kind == "nccl":
        return _open_nccl(base, members, store, name=name, timeout_s=timeout_s)
    raise PluginError(f"backend {kind!r} is not supported; gloo and nccl are")


def _open_nccl(
    base: dist.ProcessGroup,
    members: Sequence[int],
    store: distributed_c10d.Store,
    *,
    name: str,
    timeout_s: float,
) -> Group:
    all_ranks = distributed_c10d.get_process_group_ranks(base)
    options: Any = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    # Its watchdog ends the process; our own deadline ends in an error, so that comes first.
    options._timeout = 2 * timedelta(seconds=timeout_s)
    options.global_ranks_in_group = [all_ranks[member] for member in members]
    options.group_name = f"bytesched/{name}"
    rank = members.index(base.rank())
    backend = dist.ProcessGroupNCCL(store, rank, len(members), options)
    notes = _notes(store_of(base), name, base.rank())
    return Group(backend, store, notes, name=name, timeout_s=timeout_s, members=members)


def open_gloo(
    store: distributed_c10d.Store,
    root: distributed_c10d.Store,
    rank: int,
    size: int,
    *,
    name: str,
    timeout_s: float,
    members: Sequence[int] | None = None,
) -> Group:
    """A group of ``size`` ranks that connect by ``store``; their notes are in ``root``.

    Two collectives run at a time, as on a group of torch's; one if its purpose asks for no more.
    Raises `SchedulerTimeout` if one of them does not come, `PeerLost` if one goes meanwhile, or
    what the store raises.
    """
    is_short = name.rpartition("/")[2].rstrip(digits) in _SHORT
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = shared_devices("messages" if is_short else "data")
    options._threads = len(options._devices) * (1 if is_short else 2)
    # What a rank says of itself is read by those of other groups as well.
    notes = _notes(root, name, rank if members is None else members[rank])
    try:
        backend = gloo(store, rank, size, options)
    except RuntimeError as error:
        reason = in_one_line(error)
        if is_cut(reason):
            raise PeerLost(
                f"another rank went while the ranks connected for {name!r} ({reason}); see its "
                f"own log for the reason{notes.read()}",
                rank=rank,
            ) from error
        raise SchedulerTimeout(
            f"the ranks could not connect for {name!r} within {timeout_s:g} s ({reason}); "
            f"does every rank make the same calls of bytesched?{notes.read()}",
            rank=rank,
        ) from error
    group = Group(backend, store, notes, name=name, timeout_s=timeout_s, members=members)
    with closed_on_error(group):
        # Here this rank is connected with all; others may still be connecting among themselves,
        # and would take for a crash what closes the group now.
        group.wait(backend.barrier(), task="connecting")
    return group


def _notes(root: distributed_c10d.Store, name: str, rank: int) -> Notes:
    """Those of the session that a group is named after."""
    session, _, _ = name.partition("/")
    return Notes(distributed_c10d.PrefixStore(f"bytesched/{session}", root), rank)
