"""Sums in two levels: added up within the host, then between hosts, then spread.

The end of one step begins the next one, in the carrier's own thread. Each step has a group, on
which sums keep the order in which they were begun, whatever order the steps before end in.
Whether sums go so is decided by setting, or by what is faster here.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any, Final

import torch

from bytesched.errors import PluginError
from bytesched.link.levels import levels_of, ring_share, shares_hosts, two_level_share

from .group import Group
from .probing import timed

log = logging.getLogger("bytesched")

_STEPS: Final = 3
#: sums under way at a time, each with memory of its own: two on every group, and two that wait
_WINDOW: Final = 8

#: of a trial: bytes of each sum, how many follow one another, how many are under way at a time:
#: one on its way within a host in either direction, and two between hosts
_NBYTES: Final = 1 << 20
_COUNT: Final = 8
_TRIED_AT_ONCE: Final = 4
#: trials of each way; the best one counts
_TRIES: Final = 2


class TwoLevelSum:
    """A sum that has begun; it is waited for like a work of torch's."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat
        #: what every rank of this host has for our slice, and then what every rank is sent of it
        self.rows = flat
        #: how many steps have ended
        self.steps = 0
        #: what it has failed with
        self.why = ""
        self._over = threading.Event()
        self._future: torch.futures.Future[Any] = torch.futures.Future()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Returns when it has ended; raises RuntimeError if it failed, or has not by then."""
        if not self._over.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("a sum in two levels timed out")
        if self.why:
            raise RuntimeError(self.why)

    def is_completed(self) -> bool:
        """Whether it has ended, or failed."""
        return self._over.is_set()

    def get_future(self) -> torch.futures.Future[Any]:
        """Complete when it has ended; what was added to it has run when a wait is over."""
        return self._future

    def end(self) -> None:
        """Nothing of it is under way any more. The carrier's thread, mostly."""
        # A script may see how many tensors are over its memory.
        del self.flat, self.rows
        if self.why:
            self._future.set_exception(RuntimeError(self.why))
        else:
            self._future.set_result(None)
        self._over.set()


class TwoLevelSums:
    """Sums over N hosts of g ranks, of which each adds up one slice of g for its host.

    A host's interface carries 2(N-1)/N of the bytes, and a ring over all ranks more than that. A
    slice is added up in the order of the ranks on a host, and then as Gloo's ring between hosts
    does, so all ranks get the same bits.

    Args:
        gathering: the group of this host's ranks in which slices are brought together.
        between: that of the ranks which add up this slice on their hosts.
        spreading: the ranks of this host again, for the sums.
    """

    def __init__(self, gathering: Group, between: Group, spreading: Group) -> None:
        self.groups = gathering, between, spreading
        self._gathering, self._between, self._spreading = self.groups
        self._ranks, self._place = gathering.size, gathering.rank
        #: around what is begun: one thread at a time on a group, and in order
        self._lock = threading.Lock()
        #: by step, what it is to be begun for
        self._waiting: list[deque[TwoLevelSum]] = [deque() for _ in range(_STEPS)]
        self._under_way = 0
        #: what ended the first one that failed: its steps leave a gap, and none follows
        self._why = ""

    def start(self, tensor: torch.Tensor, key: str = "") -> TwoLevelSum:
        """Begins to sum ``tensor``, which is dense and on the CPU, in place; returns the work.

        On one thread at a time, in one order on all ranks; the ``key`` is for others, as that of
        `Group.all_reduce`.
        """
        if tensor.is_complex():
            # Gloo adds such numbers up, but does not deal them.
            tensor = torch.view_as_real(tensor)
        # Not of what is flat: a view would be seen by whoever counts those of a bucket.
        current = TwoLevelSum(tensor if tensor.dim() == 1 else tensor.view(-1))
        with self._lock:
            self._waiting[0].append(current)
        self._begin(0)
        return current

    def _begin(self, step: int) -> None:
        """Begins the step of all that have come to it, as far as those before them have, too."""
        begun, failed = [], []
        with self._lock:
            waiting = self._waiting[step]
            while waiting and waiting[0].steps == step:
                if not (step or self._why or self._under_way < _WINDOW):
                    break
                current = waiting.popleft()
                self._under_way += not step
                if not self._why:
                    try:
                        begun.append((current, self._operation(step, current)))
                    except Exception as error:  # noqa: BLE001 - it is raised by a wait
                        self._why = _said(error)
                if self._why:
                    current.why = current.why or self._why
                    failed.append(current)
                elif step + 1 < _STEPS:
                    self._waiting[step + 1].append(current)
        # Not with the lock: what has ended already is reported at once.
        for current, work in begun:
            work.get_future().add_done_callback(partial(self._ended, current, step))
        for current in failed:
            self._over(current)

    def _operation(self, step: int, current: TwoLevelSum) -> Any:
        count = current.flat.numel()
        bounds = (count * place // self._ranks for place in range(self._ranks + 1))
        sizes = [end - start for start, end in pairwise(bounds)]
        mine = [sizes[self._place]] * self._ranks
        if step == 0:
            current.rows = torch.empty(sum(mine), dtype=current.flat.dtype, device="cpu")
            return self._gathering.all_to_all(current.rows, current.flat, mine, sizes)
        if step == 1:
            return self._between.all_reduce(current.rows[: mine[0]])
        return self._spreading.all_to_all(current.flat, current.rows, sizes, mine)

    # -- in a thread of the carrier, mostly --------------------------------------------

    def _ended(self, current: TwoLevelSum, step: int, future: torch.futures.Future[Any]) -> None:
        try:
            future.wait()
            rows = current.rows.view(self._ranks, current.rows.numel() // self._ranks)
            if step == 0:
                for row in rows[1:]:
                    rows[0].add_(row)
            elif step == 1:
                rows[1:] = rows[0]
        except BaseException as error:
            current.why = _said(error)
            self._why = self._why or current.why
            if not isinstance(error, Exception):
                raise
        finally:
            current.steps = step + 1
            if step + 1 < _STEPS:
                self._begin(step + 1)
            else:
                self._over(current)

    def _over(self, current: TwoLevelSum) -> None:
        current.end()
        with self._lock:
            self._under_way -= 1
        self._begin(0)


def _said(error: BaseException) -> str:
    return str(error) or type(error).__name__


def open_levels(
    hierarchy: str,
    data: Group,
    open_part: Callable[[str, Sequence[int]], Group],
) -> TwoLevelSums | None:
    """The sums in two levels that the ranks of ``data`` use; None if flat ones are as good.

    Collective. With "auto" both ways are tried on the link, and the faster one is taken.

    Args:
        hierarchy: the setting, "auto", "on" or "off".
        data: a group of Gloo that knows its hosts.
        open_part: opens a group for a purpose among the ranks that are named, of which this one
            is one; collective among them.

    Raises `PluginError` for "on" where hosts have different numbers of ranks.
    """
    levels = None if hierarchy == "off" else levels_of(data.hosts)
    if levels is None:
        if hierarchy == "on":
            _explain(data.hosts)
        return None
    within, between = levels.within(data.rank), levels.between(data.rank)
    host, place = levels.hosts.index(within), within.index(data.rank)
    sums = TwoLevelSums(
        open_part(f"gathering{host}", within),
        open_part(f"between{place}", between),
        open_part(f"spreading{host}", within),
    )
    if hierarchy == "auto":
        flat_s, levels_s = _seconds(data, sums)
        log.info(
            "%d hosts of %d ranks: %.1f ms for a sum of %d KiB over all ranks, %.1f ms in two "
            "levels (by the bytes that leave a host: %.2f to 1)",
            len(levels.hosts),
            levels.ranks_per_host,
            1e3 * flat_s,
            _NBYTES >> 10,
            1e3 * levels_s,
            ring_share(data.hosts) / two_level_share(len(levels.hosts)),
        )
        if flat_s <= levels_s:
            for group in sums.groups:
                group.close()
            return None
    return sums


def _explain(hosts: Sequence[str]) -> None:
    """For a hierarchy that was asked for, and that these hosts do not have."""
    if shares_hosts(hosts):
        counts = {host: hosts.count(host) for host in dict.fromkeys(hosts)}
        raise PluginError(
            f"hierarchy is 'on', but hosts have different numbers of ranks: {counts}; start as "
            "many on each, or leave it at 'auto'"
        )
    log.info("hierarchy is on, but there is one host, or each has one rank: sums stay flat")


def _seconds(data: Group, sums: TwoLevelSums) -> tuple[float, float]:
    """Of a sum over all ranks, and of one in two levels; the same numbers on all ranks."""
    cpu = torch.device("cpu")
    best = []
    for start in (data.all_reduce, sums.start):
        once = partial(timed, start, data.wait, cpu, _NBYTES, _COUNT, _TRIED_AT_ONCE)
        best.append(min(once()[0] for _ in range(_TRIES)) / _COUNT)
    # The slowest rank's, by a sum in which others have nothing: there is no time below 0.
    everyone = torch.zeros(data.size, 2, dtype=torch.float64, device="cpu")
    everyone[data.rank] = torch.tensor(best, dtype=torch.float64, device="cpu")
    data.wait(data.all_reduce(everyone), task="a trial")
    flat_s, levels_s = everyone.amax(0).tolist()
    return flat_s, levels_s
