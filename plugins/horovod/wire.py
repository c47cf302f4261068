"""Operations of Horovod: how they are named, scaled, held, awaited, and how they fail."""

from __future__ import annotations

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
from torch import Tensor

from bytesched.errors import PeerLost, SchedulerTimeout, TransportError
from bytesched.task import CommTask

from .retrying import retry_in_background

__all__ = ["Held", "HorovodFailed", "HorovodPeerLost", "HorovodTimeout", "Wire"]

#: between two looks at an operation that the user's thread waits for; each nap is so much longer
#: than the one before, so that one that takes a millisecond is not found half a millisecond late
_SHORTEST_NAP_S: Final = 1e-4
_LONGEST_NAP_S: Final = 5e-4
_LONGER: Final = 1.25

#: Powers of two that double precision is scaled by, so that chunks differ.
_POWERS: Final = 512

#: between two tries to give up what is under way
_END_NAP_S: Final = 0.01

#: Horovod's refusal of a name that was announced and is not reduced yet
_NAME_IN_USE: Final = "with the same name as another tensor"

#: What a rank that gives up announces instead of a chunk: its shape is that of no chunk.
_GAVE_UP: Final = re.compile(r"\[1, 1, (\d+)\]")


class HorovodFailed(TransportError, HorovodInternalError):  # type: ignore[misc]
    """A transfer through Horovod failed."""


class HorovodTimeout(SchedulerTimeout, HorovodInternalError):  # type: ignore[misc]
    """A transfer through Horovod, or a wait for it, outlived its deadline."""


class HorovodPeerLost(PeerLost, HorovodInternalError):  # type: ignore[misc]
    """Another rank is gone, has failed, or has given up."""


class Wire:
    """What one session announces to Horovod.

    Args:
        process_set: the ranks.
        average: whether gradients are averaged, or summed.
        predivide: what averaged gradients are divided by before the sum.
        name: of the session, the same on all ranks, unique in this job.
        timeout_s: of every wait.
    """

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
        self._held = Held()
        #: where its indices begin, so that chunks of two sessions differ as well
        self._first = crc32(name.encode()) % 1024 << 12
        #: what the other ranks wait for
        self._expected: Sequence[CommTask] = ()
        self._dtype_of: Callable[[CommTask], torch.dtype]
        self._has_given_up = False

    def sum(self, tensor: Tensor, key: str) -> int:
        """Announces the sum of ``tensor``, in place, under ``key``."""
        name = f"{self._name}.{key}"
        self._held.hold(key, tensor)
        if not tensor.is_floating_point():
            return self._start(tensor, name, hvd.Sum, (1.0, 1.0))
        index = self._keys.setdefault(key, len(self._keys))
        return self._start(
            tensor, name, hvd.Sum, _unfused(self._first + index, tensor.dtype, (1.0, 1.0), 1)
        )

    def reduce(self, chunk: CommTask, packed: Tensor) -> int:
        """Announces ``chunk``, whose gradients are in ``packed``."""
        divisor = self.size if self._op == hvd.Average else 1
        scale = _unfused(self._first + chunk.index, packed.dtype, self._scale, divisor)
        self._held.hold(chunk.index, packed)
        return self._start(packed, self.chunk_name(chunk), self._op, scale)

    def chunk_name(self, chunk: CommTask) -> str:
        """What Horovod calls ``chunk``; a chunk of another cut has another name or is the same."""
        return f"{self._name}.{chunk.index:04d}.{chunk.name}.{chunk.nbytes}"

    def gather_text(self, key: str, text: str) -> list[str]:
        """Every rank's ``text``, by rank."""
        return self.texts(self.announce_text(key, text))

    def announce_text(self, key: str, text: str) -> tuple[int, int]:
        """Announces this rank's ``text`` under ``key``; returns what ``texts`` takes."""
        mine = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        sizes = self._gather(torch.tensor([len(mine)], device="cpu"), f"{self._name}.{key}.size")
        return sizes, self._gather(mine, f"{self._name}.{key}")

    def texts(self, works: tuple[int, int]) -> list[str]:
        """Every rank's text, by rank, when all have announced theirs."""
        sizes, texts = (self.wait(work, task=f"{self._name}: texts") for work in works)
        return [part.numpy().tobytes().decode() for part in texts.split(sizes.tolist())]

    def _gather(self, tensor: Tensor, name: str) -> int:
        try:
            work: int = hvd.allgather_async(tensor, name=name, process_set=self._process_set)
        except HorovodInternalError as error:
            raise self.error(error, task=name) from error
        return work

    def wait(self, work: int, *, task: str = "") -> Any:
        """The tensor that ``work`` made, when it has; naps meanwhile."""
        deadline = time.monotonic() + self.timeout_s
        nap_s = _SHORTEST_NAP_S
        while not self.is_done(work):
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

    def error(self, cause: BaseException, *, task: str = "") -> TransportError:
        """``cause`` as an error of ours, still one of Horovod's."""
        text = str(cause)
        kind: type[TransportError] = HorovodFailed
        what = f"Horovod failed: {text}"
        gave_up = _GAVE_UP.search(text)
        if gave_up is not None:
            culprit = int(gave_up.group(1)) - 1
            what = f"rank {culprit} gave up; see its own log for the reason"
            return HorovodPeerLost(what, peers=[culprit], task=task, rank=self.rank)
        if "has been cleared" in text:
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

    def let_go(self) -> None:
        """Nothing is under way: what was sent so far is the caller's alone."""
        self._held = Held()

    def expect(
        self, chunks: Sequence[CommTask], dtype_of: Callable[[CommTask], torch.dtype]
    ) -> None:
        """The other ranks wait for these in every round; a list that may hold others later."""
        self._expected = chunks
        self._dtype_of = dtype_of

    def give_up(self, keys: Sequence[str]) -> None:
        """What the other ranks wait for ends in errors everywhere. Idempotent, any thread.

        Horovod itself is not ours to stop. But announcing a chunk in a shape that no other rank
        has makes it an error on every rank, as soon as all have announced it.

        Args:
            keys: of sums of whole numbers that the others may wait for.
        """
        if self._has_given_up:
            return
        self._has_given_up = True
        ends = {f"{self._name}.{key}": torch.int64 for key in keys}
        ends |= {self.chunk_name(chunk): self._dtype_of(chunk) for chunk in self._expected}
        if under_way := self._announce_ends(ends):
            self._announce_later(under_way)

    def _announce_later(self, ends: dict[str, torch.dtype]) -> None:
        """Announces ``ends``, whose names are under way still, each when it no longer is."""
        left = ends

        def announce() -> bool:
            nonlocal left
            left = self._announce_ends(left)
            return not left

        # In a process that is ending, the others hear of that.
        retry_in_background(
            announce, name="bytesched-giving-up", nap_s=_END_NAP_S, timeout_s=self.timeout_s
        )

    def _announce_ends(self, ends: dict[str, torch.dtype]) -> dict[str, torch.dtype]:
        """Announces ``ends``, by name; returns those whose names are under way."""
        under_way: dict[str, torch.dtype] = {}
        for name, dtype in ends.items():
            nothing = torch.empty(1, 1, self.rank + 1, dtype=dtype, device="cpu")
            self._held.hold(name, nothing)
            try:
                self._start(nothing, name, hvd.Sum, (1.0, 1.0))
            except (HorovodInternalError, ValueError) as error:
                # The other reason is that Horovod was shut down.
                if _NAME_IN_USE in str(error):
                    under_way[name] = dtype
        return under_way

    def _start(self, tensor: Tensor, name: str, op: int, scale: tuple[float, float]) -> int:
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


class Held:
    """Tensors under keys, the latest for each, held by more than their Python objects.

    Who lets go of a tensor that only its Python object holds besides needs the interpreter's lock
    (torch 2.10 and later, c10/util/intrusive_ptr.h). Horovod's thread lets go of everything that
    was announced when it shuts down, with its queue locked, where a thread that has that lock may
    be about to announce something: both would wait for ever.
    """

    def __init__(self) -> None:
        self._held: dict[int | str, tuple[Tensor, Tensor]] = {}

    def hold(self, key: int | str, tensor: Tensor) -> None:
        """From now on ``tensor`` is held under ``key``, and what was before is not."""
        held = self._held.get(key)
        if held is None or held[0] is not tensor:
            self._held[key] = tensor, _holder(tensor)


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
