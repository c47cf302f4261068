"""Operations of Horovod: how they are named, held, awaited, and how they fail."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any, Final

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from torch import Tensor

from bytesched.errors import PeerLost, SchedulerTimeout, TransportError

from ..routes.group import is_cut, is_late

#: between two looks at an operation that the user's thread waits for; each nap is so much longer
#: than the one before, so that one that takes a millisecond is not found half a millisecond late
_SHORTEST_NAP_S: Final = 1e-4
_LONGEST_NAP_S: Final = 5e-4
_LONGER: Final = 1.25

#: What a rank that gives up announces instead of a chunk: its shape is that of no chunk.
_GAVE_UP: Final = re.compile(r"\[1, 1, (\d+)\]")


class HorovodFailed(TransportError, HorovodInternalError):  # type: ignore[misc]
    """A transfer through Horovod failed."""


class HorovodTimeout(SchedulerTimeout, HorovodInternalError):  # type: ignore[misc]
    """A transfer through Horovod, or a wait for it, outlived its deadline."""


class HorovodPeerLost(PeerLost, HorovodInternalError):  # type: ignore[misc]
    """Another rank is gone, has failed, or has given up."""


def is_done(handle: int) -> bool:
    """Whether what has this handle of Horovod's has ended, or failed."""
    try:
        return bool(hvd.poll(handle))
    except ValueError:
        # Horovod was shut down and has forgotten it; its result will say so.
        return True


class Work:
    """What was announced."""

    __slots__ = ("handle", "is_here")

    def __init__(self, handle: int) -> None:
        self.handle = handle
        #: it was waited for, and Horovod has forgotten it
        self.is_here = False

    def is_completed(self) -> bool:
        """Whether a wait for it would return, or raise, at once."""
        return self.is_here or is_done(self.handle)


class Operations:
    """What one session, or what comes before it, announces to Horovod.

    Args:
        name: in front of that of each operation, the same on all ranks, unique in this job.
    """

    def __init__(self, process_set: hvd.ProcessSet, *, name: str, timeout_s: float) -> None:
        self.rank: int = process_set.rank()
        self.size: int = process_set.size()
        self.timeout_s = timeout_s
        self._process_set = process_set
        self._name = name
        self._held = Held()

    def allreduce(
        self, tensor: Tensor, key: str, op: int, scale: tuple[float, float] = (1.0, 1.0)
    ) -> Work:
        """Announces ``tensor``, scaled before and after the sum, in place."""
        self._held.hold(tensor)
        return self._announced(
            hvd.allreduce_async_,
            tensor,
            key,
            op=op,
            prescale_factor=scale[0],
            postscale_factor=scale[1],
        )

    def gather_text(self, key: str, text: str) -> list[str]:
        """Every rank's ``text``, by rank."""
        return self.texts(self.announce_text(key, text))

    def announce_text(self, key: str, text: str) -> tuple[Work, Work]:
        """Announces this rank's ``text`` under ``key``; returns what ``texts`` takes."""
        mine = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        size = torch.tensor([len(mine)], device="cpu")
        sizes = self._announced(hvd.allgather_async, size, f"{key}.size")
        return sizes, self._announced(hvd.allgather_async, mine, key)

    def texts(self, works: tuple[Work, Work]) -> list[str]:
        """Every rank's text, by rank, when all have announced theirs."""
        sizes, texts = (self.wait(work, f"{self._name}: texts") for work in works)
        return [part.numpy().tobytes().decode() for part in texts.split(sizes.tolist())]

    def _announced(
        self, announce: Callable[..., int], tensor: Tensor, key: str, **options: Any
    ) -> Work:
        name = f"{self._name}.{key}"
        try:
            return Work(announce(tensor, name=name, process_set=self._process_set, **options))
        except (HorovodInternalError, ValueError) as error:
            raise self._error(error, task=key) from error

    def wait(self, work: Work, task: str = "") -> Any:
        """Naps until ``work`` has ended; the first time, returns the tensor that it made."""
        if work.is_here:
            return None
        deadline = time.monotonic() + self.timeout_s
        nap_s = _SHORTEST_NAP_S
        while not is_done(work.handle):
            if time.monotonic() > deadline:
                raise HorovodTimeout(
                    f"no progress within {self.timeout_s:g} s: a rank is stopped, stuck or in "
                    "other code; do all ranks make the same calls, in the same order?",
                    task=task,
                    rank=self.rank,
                )
            # Not hvd.synchronize alone: it spins.
            time.sleep(nap_s)
            nap_s = min(_LONGER * nap_s, _LONGEST_NAP_S)
        try:
            output = hvd.synchronize(work.handle)
        except (HorovodInternalError, ValueError) as error:
            raise self._error(error, task=task) from error
        if output is None:
            raise self._error(ValueError("its handle has been cleared"), task=task)
        work.is_here = True
        return output

    def _error(self, cause: BaseException, *, task: str) -> TransportError:
        """``cause`` as an error of ours, still one of Horovod's."""
        text = str(cause)
        about: dict[str, Any] = {"task": task, "rank": self.rank}
        if (gave_up := _GAVE_UP.search(text)) is not None:
            culprit = int(gave_up.group(1)) - 1
            what = f"rank {culprit} gave up; see its own log for the reason"
            return HorovodPeerLost(what, peers=[culprit], **about)
        if "has been cleared" in text:
            what = f"this rank shut Horovod down before it was complete ({text})"
            return HorovodFailed(what, **about)
        if "shut down" in text:
            what = f"another rank has ended or failed; see its own log ({text.strip()})"
            return HorovodPeerLost(what, **about)
        if is_late(text):
            return HorovodTimeout(f"a rank is stopped or stuck ({text.strip()})", **about)
        if is_cut(text):
            what = f"another rank is gone ({text.strip()}); see its own log for the reason"
            return HorovodPeerLost(what, **about)
        return HorovodFailed(f"Horovod failed: {text}", **about)


class Held:
    """Tensors that are held by more than their Python objects.

    Who lets go of a tensor that only its Python object holds besides needs the interpreter's lock
    (torch 2.10 and later, c10/util/intrusive_ptr.h). Horovod's thread lets go of everything that
    was announced when it shuts down, with its queue locked, where a thread that has that lock may
    be about to announce something: both would wait for ever.
    """

    def __init__(self) -> None:
        #: by the id of the tensor, which is in it
        self._held: dict[int, tuple[Tensor, Tensor]] = {}
        #: what was held before, and has not been held again
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def hold(self, tensor: Tensor) -> None:
        """From now on ``tensor`` is held."""
        held = self._held.get(id(tensor)) or self._before.pop(id(tensor), None)
        self._held[id(tensor)] = held or (tensor, _holder(tensor))

    def let_go(self) -> None:
        """What is not held again until the next call is not held from there on."""
        self._before, self._held = self._held, {}


class _Hold(torch.autograd.Function):
    """What autograd saves is held by the node that saved it, without Python."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return anchor.clone()


def _holder(tensor: Tensor) -> Tensor:
    with torch.enable_grad():
        anchor = torch.zeros((), device="cpu", requires_grad=True)
        held: Tensor = _Hold.apply(anchor, tensor)  # type: ignore[no-untyped-call]
    return held
