"""Horovod as what carries a session: its all-reduce, its negotiation, its errors."""

from __future__ import annotations

import contextlib
import logging
import math
import re
import time
from collections.abc import Callable, Sequence
from ctypes import c_float
from typing import Any, Final
from zlib import crc32

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

from bytesched.config import Config
from bytesched.errors import PeerLost, SchedulerTimeout, TransportError
from bytesched.plugins.horovod.held import Held
from bytesched.plugins.horovod.order import Negotiated
from bytesched.plugins.horovod.transport import HorovodTransport
from bytesched.plugins.layout.packing import Packer
from bytesched.plugins.session.peers import Agreement
from bytesched.plugins.session.retuning import WORD
from bytesched.plugins.session.streams import Streams
from bytesched.plugins.session.warmup import WARM_UP
from bytesched.task import CommTask

__all__ = ["HorovodFailed", "HorovodPeerLost", "HorovodPeers", "HorovodTimeout"]

log = logging.getLogger("bytesched")

#: between two looks at an operation that the user's thread waits for; each nap is so much longer
#: than the one before, so that one that takes a millisecond is not found half a millisecond late
_SHORTEST_NAP_S: Final = 1e-4
_LONGEST_NAP_S: Final = 5e-4
_LONGER: Final = 1.25

#: Powers of two that double precision is scaled by, so that chunks differ.
_POWERS: Final = 512

#: What a rank that gives up announces instead of a chunk: its shape is that of no chunk.
_GAVE_UP: Final = re.compile(r"\[1, 1, (\d+)\]")


class HorovodFailed(TransportError, HorovodInternalError):  # type: ignore[misc]
    """A transfer through Horovod failed."""


class HorovodTimeout(SchedulerTimeout, HorovodInternalError):  # type: ignore[misc]
    """A transfer through Horovod, or a wait for it, outlived its deadline."""


class HorovodPeerLost(PeerLost, HorovodInternalError):  # type: ignore[misc]
    """Another rank is gone, has failed, or has given up."""


class HorovodPeers:
    """The ranks of a process set (see peers.Peers).

    Args:
        process_set: the ranks.
        average: whether gradients are averaged, or summed.
        predivide: what averaged gradients are divided by before the sum.
        name: of the session, the same on all ranks, unique in this job.
        timeout_s: of every wait.
    """

    #: sending averages
    divisor = 1
    #: its one thread negotiates what is next when it has reduced what was ready
    hides_overhead = False
    backend = "horovod"
    knobs = frozenset({"partition_bytes", "credit_bytes", "policy"})
    replayed: frozenset[str] = frozenset()

    def __init__(
        self,
        process_set: hvd.ProcessSet,
        *,
        average: bool,
        predivide: float,
        name: str,
        timeout_s: float,
    ) -> None:
        self.rank: int = process_set.rank()
        self.size: int = process_set.size()
        self.timeout_s = timeout_s
        self._process_set = process_set
        self._op = hvd.Average if average else hvd.Sum
        self._scale = (1.0 / predivide, predivide) if average else (1.0, 1.0)
        self._name = name
        self._keys: dict[str, int] = {}
        #: those of the session's plan, a list that holds others after a new cut
        self._chunks: Sequence[CommTask] = ()
        #: rank 0 has a word between two steps
        self._tuned = False
        #: indices of the chunks that this rank has announced and that are not reduced
        self._announced: set[int] = set()
        self._aborted = False
        self._held = Held()
        #: where its indices begin, so that chunks of two sessions differ as well
        self._first = crc32(name.encode()) % 1024 << 12
        # - with the transport
        self._packer: Packer

    def sum(self, tensor: torch.Tensor, key: str) -> int:
        name = f"{self._name}.{key}"
        self._held.hold(key, tensor)
        if not tensor.is_floating_point():
            return self._start(tensor, name, hvd.Sum, (1.0, 1.0))
        index = self._keys.setdefault(key, len(self._keys))
        return self._start(
            tensor, name, hvd.Sum, _unfused(self._first + index, tensor.dtype, (1.0, 1.0), 1)
        )

    def reduce(self, chunk: CommTask, packed: torch.Tensor) -> int:
        self._announced.add(chunk.index)
        divisor = self.size if self._op == hvd.Average else 1
        scale = _unfused(self._first + chunk.index, packed.dtype, self._scale, divisor)
        self._held.hold(chunk.index, packed)
        return self._start(packed, self.chunk_name(chunk), self._op, scale)

    def chunk_name(self, chunk: CommTask) -> str:
        """What Horovod calls ``chunk``; a chunk of another cut has another name or is the same."""
        return f"{self._name}.{chunk.index:04d}.{chunk.name}.{chunk.nbytes}"

    def gather_text(self, key: str, text: str) -> list[str]:
        """Every rank's ``text``, by rank."""
        mine = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        sizes = self._gather(torch.tensor([len(mine)], device="cpu"), f"{self._name}.{key}.size")
        texts = self._gather(mine, f"{self._name}.{key}")
        return [part.numpy().tobytes().decode() for part in texts.split(sizes.tolist())]

    def _gather(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        try:
            work = hvd.allgather_async(tensor, name=name, process_set=self._process_set)
        except HorovodInternalError as error:
            raise self.error(error, task=name) from error
        gathered: torch.Tensor = self.wait(work, task=name)
        return gathered

    def clock_offset_ns(self) -> int:
        """What must be added to this host's wall clock to read rank 0's; collective."""
        for _ in range(3):
            # The last one ends at nearly the same moment everywhere.
            self.wait(self.sum(torch.zeros(1, device="cpu"), "clock"), task="comparing clocks")
        mine_ns = time.time_ns()
        leaders = torch.tensor([mine_ns if self.rank == 0 else 0], device="cpu")
        self.wait(self.sum(leaders, "clock of rank 0"), task="comparing clocks")
        return int(leaders.item()) - mine_ns

    def wait(self, work: Any, *, task: str = "") -> Any:
        deadline = time.monotonic() + self.timeout_s
        nap_s = _SHORTEST_NAP_S
        while not self.is_done(work):
            if time.monotonic() > deadline:
                raise HorovodTimeout(
                    f"no progress within {self.timeout_s:g} s: a rank is stopped, stuck or in "
                    "other code; do all ranks do the same, in one order?",
                    task=task,
                    rank=self.rank,
                )
            # Not hvd.synchronize alone: it spins.
            time.sleep(nap_s)
            nap_s = min(_LONGER * nap_s, _LONGEST_NAP_S)
        return self.result(work, task=task)

    def is_done(self, work: int) -> bool:
        """True if ``result`` would not wait."""
        try:
            return bool(hvd.poll(work))
        except ValueError:
            # Horovod was shut down and has forgotten it; its result will say so.
            return True

    def result(self, work: int, *, task: str) -> Any:
        """The tensor that ``work`` made; its failure is an error of ours."""
        try:
            output = hvd.synchronize(work)
        except (HorovodInternalError, ValueError) as error:
            raise self.error(error, task=task) from error
        if output is None:
            raise self.error(ValueError("its handle has been cleared"), task=task)
        return output

    def reduced(self, chunk: CommTask) -> None:
        """``chunk`` is no longer under way."""
        self._announced.discard(chunk.index)
        if self._aborted:
            self._announce_end(chunk)

    def error(self, cause: BaseException, *, task: str = "") -> TransportError:
        """``cause`` as an error of ours, still one of Horovod's."""
        text = str(cause)
        kind: type[TransportError] = HorovodFailed
        what = f"Horovod failed: {text}"
        gave_up = _GAVE_UP.search(text)
        if gave_up is not None:
            kind = HorovodPeerLost
            culprit = int(gave_up.group(1)) - 1
            what = f"rank {culprit} gave up; see its own log for the reason"
        elif "has been cleared" in text:
            what = f"this rank shut Horovod down before it was complete ({text})"
        elif "shut down" in text:
            kind = HorovodPeerLost
            what = f"another rank has ended or failed; see its own log ({text.strip()})"
        elif any(sign in text for sign in ("Timed out", "timed out", "timeout", "Timeout")):
            kind = HorovodTimeout
            what = f"a rank is stopped or stuck ({text.strip()})"
        elif any(sign in text for sign in ("closed by peer", "reset by peer", "Broken pipe")):
            kind = HorovodPeerLost
            what = f"another rank is gone ({text.strip()}); see its own log for the reason"
        return kind(what, task=task, rank=self.rank)

    def transport(self, packer: Packer, streams: Streams) -> HorovodTransport:
        self._packer = packer
        return HorovodTransport(self, packer, streams)

    def let_go(self) -> None:
        """Nothing is under way: what was sent so far is the caller's alone."""
        self._held = Held()

    def agreement(self, chunks: Sequence[CommTask], config: Config) -> Agreement:
        self.let_go()
        self._chunks = chunks
        self._tuned = config.tune
        return Negotiated(self, self._packer, chunks, config)

    def timeout(self, message: str, story: Callable[[], str]) -> SchedulerTimeout:
        return HorovodTimeout(message, rank=self.rank, story=story().splitlines())

    def leave_note(self, text: str) -> None:
        log.error("rank %d gives up: %s", self.rank, text)

    def abort(self) -> None:
        # Horovod itself is not ours to stop. But announcing a chunk in a shape that no other
        # rank has makes it an error on every rank, as soon as all have announced it.
        if self._aborted:
            return
        self._aborted = True
        if not self._chunks:
            self._announce_nothing(f"{self._name}.{WARM_UP}", torch.int64)
        if self._tuned:
            self._announce_nothing(f"{self._name}.{WORD}", torch.int64)
        for chunk in self._chunks:
            if chunk.index not in self._announced:
                self._announce_end(chunk)

    def _announce_end(self, chunk: CommTask) -> None:
        self._announce_nothing(self.chunk_name(chunk), self._packer.memory(chunk).dtype)

    def _announce_nothing(self, name: str, dtype: torch.dtype) -> None:
        nothing = torch.empty(1, 1, self.rank + 1, dtype=dtype, device="cpu")
        self._held.hold(name, nothing)
        with contextlib.suppress(HorovodInternalError, ValueError):
            self._start(nothing, name, hvd.Sum, (1.0, 1.0))

    def close(self) -> None:
        if self._announced:
            # A backward pass was interrupted, and the other ranks wait for the rest of it.
            self.abort()

    def _start(self, tensor: torch.Tensor, name: str, op: int, scale: tuple[float, float]) -> int:
        handle: int = hvd.allreduce_async_(
            tensor,
            name=name,
            op=op,
            prescale_factor=scale[0],
            postscale_factor=scale[1],
            process_set=self._process_set,
        )
        return handle


def _unfused(
    index: int, dtype: torch.dtype, scale: tuple[float, float], divisor: int
) -> tuple[float, float]:
    """``scale``, before and after the sum, in a form that no other index has; the same result.

    Horovod fuses what is ready together into one operation, up to a threshold that is read when
    it starts; but only what has the same factors (controller.cc, FuseResponses). ``divisor`` is
    what it divides by in the end.
    """
    before, after = scale
    if dtype is torch.float64:
        power = 2.0 ** (index % _POWERS - _POWERS // 2)
        return before / power, after * power
    # Narrower types are scaled in single precision, which does not see this. Two steps, because
    # dividing may bring neighbours together.
    other = after + 2 * index * math.ulp(after)
    same = c_float(other / divisor).value == c_float(after / divisor).value
    return before, other if same else after
