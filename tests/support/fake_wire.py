"""A wire in one process, and a watch over what comes after what; DDPs that are planned over both.

A sum is made when somebody waits for it, or the test lets it: whoever reads too early reads other
numbers. `Order` notes which memory every operation reads and writes, on which of `fake_cuda`'s
streams, and names what no wait orders after the last write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import count
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from fake_cuda import CUDA, Clock
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from bytesched.config import Config
from bytesched.errors import SchedulerTimeout
from bytesched.observe import Observer, Observers
from bytesched.plugins.planned.bundles import BundleState, Slot
from bytesched.plugins.planned.cutting import ends_of
from bytesched.plugins.planned.reducer import renew
from bytesched.plugins.planned.session import PlannedSession
from bytesched.plugins.planned.wire import HOST
from bytesched.plugins.proxies.metadata import tensors_in
from bytesched.plugins.proxies.pending import PendingParameter
from bytesched.plugins.proxies.pending_grads import PendingGrad
from bytesched.plugins.update import stepping, surroundings
from bytesched.tunable import Setting

__all__ = ["FakeWire", "Order", "Run", "alone", "inputs", "mlp", "sgd"]


# -- the wire --------------------------------------------------------------------------


class FakeWork:
    """A sum that is under way until it is finished."""

    def __init__(self, make: Callable[[], None], clock: Clock | None = None) -> None:
        self._make = make
        #: its place
        self.clock = Clock() if clock is None else clock
        self.is_over = False
        self._callbacks: list[Callable[[Any], None]] = []

    def is_completed(self) -> bool:
        return self.is_over

    def finish(self) -> None:
        """The sum is in memory."""
        if not self.is_over:
            self.is_over = True
            self._make()
            for call in self._callbacks:
                call(self)

    def get_future(self) -> FakeWork:
        return self

    def add_done_callback(self, call: Callable[[Any], None]) -> None:
        self._callbacks.append(call)


class FakeWire:
    """See `bytesched.plugins.planned.wire.Wire`: all other ranks have the same gradients.

    Args:
        has_streams: a wait holds the current stream back, and not the host.
        ranks: the wires of all ranks, to which this one is added; alone if None.
    """

    def __init__(
        self,
        has_streams: bool = False,
        *,
        order: Order | None = None,
        ranks: list[FakeWire] | None = None,
        size: int = 2,
    ) -> None:
        self.has_streams = has_streams
        self.size = size
        self.timeout_s = 100.0
        self._order = order
        self._ranks = [] if ranks is None else ranks
        self.rank = len(self._ranks)
        self._ranks.append(self)
        #: what was started, in order, and its works
        self.started: list[Tensor] = []
        self.works: list[FakeWork] = []
        #: what this rank tells the others, operation by operation
        self.told: list[list[float]] = []
        self.notes: list[str] = []
        self.is_aborted = self.is_closed = False
        #: what every wait raises
        self.error: BaseException | None = None

    def start(self, tensor: Tensor) -> FakeWork:
        self.started.append(tensor)
        clock = None if self._order is None else self._order.starts(tensor)
        self.works.append(FakeWork(partial(self._sum, tensor), clock))
        return self.works[-1]

    def _sum(self, tensor: Tensor) -> None:
        with _unnoticed(self._order):
            # No version is counted: a back end counts none.
            tensor.data.mul_(self.size)

    def start_largest(self, numbers: Tensor) -> FakeWork:
        place = len(self.told)
        self.told.append(numbers.tolist())

        def largest() -> None:
            with _unnoticed(self._order):
                tables = [torch.tensor(rank.told[place]).to(numbers) for rank in self._ranks]
                numbers.copy_(torch.stack(tables).amax(0))

        return FakeWork(largest)

    def wait(self, work: FakeWork, task: str) -> None:
        if self.error is not None:
            raise self.error
        if not isinstance(work, FakeWork):
            raise SchedulerTimeout("it was never issued", task=task, rank=self.rank)
        work.finish()
        if self.has_streams:
            CUDA.current().clock |= work.clock
        else:
            CUDA.host |= work.clock

    def let(self, *, but: int = 0) -> None:
        """What was started is over, but for the last ones."""
        for work in self.works[: len(self.works) - but]:
            work.finish()

    def stream(self) -> int:
        return CUDA.current().cuda_stream if self.has_streams else HOST

    def leave_note(self, text: str) -> None:
        self.notes.append(text)

    def abort(self) -> None:
        self.is_aborted = True

    def close(self) -> None:
        self.is_closed = True


# -- the watch -------------------------------------------------------------------------


class Access(NamedTuple):
    """A read or a write of some bytes, and its place."""

    begin: int
    end: int
    #: the stream, and what was queued there by then
    stream: str
    queued: int
    by: str
    is_write: bool
    #: it has copied what was not summed
    is_unsummed: bool

    def is_before(self, place: Clock) -> bool:
        """Whether something orders what has this place after it."""
        return place[self.stream] >= self.queued


#: a stream for each sum
_sums = count(1)
#: they read shapes alone
_SHAPES = ("_like", "new_empty", "new_full", "new_ones", "new_zeros", "new_empty_strided")
#: nothing of what they write into is read
_OVERWRITING = {
    "copy_",
    "fill_",
    "zero_",
    "normal_",
    "uniform_",
    "_foreach_copy_",
    "_foreach_zero_",
}


@lru_cache
def _arguments(func: Any) -> tuple[str, list[tuple[str, bool]]] | None:
    """The name of an operation, its arguments, and which are written; None if it has no kernel."""
    schema = func._schema
    name = schema.name.rpartition("::")[2]
    returned = [one.alias_info for one in schema.returns]
    is_view = any(info is not None and not info.is_write for info in returned)
    if is_view or schema.name.startswith("profiler"):
        return None
    infos = () if name.endswith(_SHAPES) else ((a.name, a.alias_info) for a in schema.arguments)
    return name, [(one, info is not None and info.is_write) for one, info in infos]


class Order(TorchDispatchMode):
    """Notes what operations read and write, and finds those that nothing orders.

    It is part of the device: product code does not see that there is a mode.
    """

    def __init__(self) -> None:
        super().__init__()
        #: what was found, in words
        self.found: list[str] = []
        self._accesses: dict[int, list[Access]] = {}
        #: what gives a name to memory
        self.names: list[Callable[[], Iterable[tuple[str, Tensor]]]] = []
        #: parameters that may be owed an update
        self.slots: list[Slot] = []
        #: whether DDP is copying what nobody reads before it is summed
        self.may_copy: list[Callable[[], bool]] = []
        self._is_off = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, everything of this thread is noted, what sessions do out of sight, too."""
        with (
            mock.patch.object(stepping, "has_modes", return_value=False),
            mock.patch.object(surroundings, "_disable_current_modes", self._only),
            self,
        ):
            yield

    @contextmanager
    def _only(self) -> Iterator[None]:
        with _disable_current_modes(), self:
            yield

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside, nothing is noted."""
        before, self._is_off = self._is_off, True
        try:
            yield
        finally:
            self._is_off = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            arguments = None if self._is_off else _arguments(func)
            if arguments is not None:
                known = self._note(*arguments, args, kwargs)
            made = func(*args, **kwargs)
            if arguments is not None:
                self._made(arguments[0], made, known)
            return made

    def _note(
        self, name: str, parameters: Sequence[tuple[str, bool]], args: Any, kwargs: Any
    ) -> set[int]:
        """One operation; returns the addresses of all memory that it is given."""
        known: set[int] = set()
        place, stream = CUDA.current().queue(), CUDA.current().name
        written: list[Tensor] = []
        is_unsummed = False
        for number, (parameter, is_written) in enumerate(parameters):
            value = args[number] if number < len(args) else kwargs.get(parameter)
            tensors = tensors_in(value)
            known.update(_memory(tensor)[0] for tensor in tensors)
            written += tensors if is_written else []
            if is_written and (name in _OVERWRITING or parameter == "out"):
                continue
            for tensor in tensors:
                is_unsummed |= self._access(tensor, place, stream, name, is_write=False)
        for tensor in written:
            self._access(tensor, place, stream, name, is_write=True, is_unsummed=is_unsummed)
        return known

    def _made(self, name: str, made: Any, known: set[int]) -> None:
        """New memory has no past."""
        stream = CUDA.current()
        for tensor in tensors_in(made):
            if _memory(tensor)[0] not in known:
                self._accesses.pop(_memory(tensor)[0], None)
                self._access(tensor, stream.clock, stream.name, name, is_write=True)

    def starts(self, tensor: Tensor) -> Clock:
        """A sum begins on a stream of its own, after what is queued here; returns its place."""
        place, name = CUDA.current().queue(), f"sum {next(_sums)}"
        place[name] = 1
        self._access(tensor, place, name, name, is_write=True, reads=True)
        return place

    def _access(
        self,
        tensor: Tensor,
        place: Clock,
        stream: str,
        by: str,
        *,
        is_write: bool,
        is_unsummed: bool = False,
        reads: bool = False,
    ) -> bool:
        """Notes it; returns whether it copies what has not been summed."""
        memory, begin, end = _memory(tensor)
        if begin == end:
            return False
        for slot in self.slots:
            if slot.bundle.state is BundleState.OWED and not reads:
                self._is_owed(slot, by, (memory, begin, end), is_write=is_write)
        before = self._accesses.setdefault(memory, [])
        copies = False
        for other in before:
            if other.begin >= end or begin >= other.end:
                continue
            is_after = other.is_before(place)
            reads_unsummed = other.is_unsummed and (reads or not is_write)
            if is_after and not reads_unsummed or not (is_write or other.is_write):
                continue
            if by == "copy_" and not is_write and any(may() for may in self.may_copy):
                copies = True
                continue
            how = "a copy of what is not summed, by" if is_after else "and waits for no end of"
            where = "" if other.by.startswith("sum ") else f" on {other.stream}"
            self._find(by, begin, end, f"{how} {other.by}{where}", is_write=is_write)
        # What is overwritten, or read again on the same stream, decides no more.
        before[:] = [
            other
            for other in before
            if not (begin <= other.begin and other.end <= end)
            or (other.is_write and not is_write)
            or not other.is_before(place)
        ]
        before.append(Access(begin, end, stream, place[stream], by, is_write, is_unsummed))
        return copies

    def _is_owed(self, slot: Slot, by: str, where: tuple[int, int, int], *, is_write: bool) -> None:
        """An update is to be made, of a parameter and from a gradient that stay as they are."""
        if _overlap(where, _memory(slot.parameter)):
            self._find(by, *where[1:], "which waits for its update", is_write=is_write)
        elif is_write and slot.member is not None and _overlap(where, _memory(slot.member.view)):
            if any(slot in debt.slots for debt in slot.bundle.debts):
                self._find(by, *where[1:], "which an update is to read", is_write=True)

    def _find(self, by: str, begin: int, end: int, why: str, *, is_write: bool = False) -> None:
        names = [
            name
            for known in self.names
            for name, tensor in known()
            if _overlap((0, begin, end), _memory(tensor))
        ]
        what = ", ".join(dict.fromkeys(names)) or "something"
        stream = CUDA.current().name
        self.found.append(f"{by} on {stream} {'writes' if is_write else 'reads'} {what}, {why}")


def _memory(tensor: Tensor) -> tuple[int, int, int]:
    """The address of its storage, and the bytes from and to which it lies there."""
    with torch._C.DisableTorchFunctionSubclass():
        if not tensor.numel():
            return 0, 0, 0
        begin = tensor.data_ptr()
        last = sum(
            (n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        storage = tensor.untyped_storage().data_ptr()
        return storage, begin, begin + (last + 1) * tensor.element_size()


def _overlap(one: tuple[int, int, int], other: tuple[int, int, int]) -> bool:
    return max(one[1], other[1]) < min(one[2], other[2])


@contextmanager
def _unnoticed(order: Order | None) -> Iterator[None]:
    with nullcontext() if order is None else order.off():
        yield


# -- what is trained -------------------------------------------------------------------


@contextmanager
def alone() -> Iterator[None]:
    """A process group of one rank, for DDP."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def mlp() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 4))


def sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def inputs(step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


@dataclass
class Run:
    """A DDP and its optimizer; planned if there is a wire."""

    wire: FakeWire | None = None
    order: Order | None = None
    make: Callable[[], nn.Module] = mlp
    optimizer_of: Callable[[Iterable[Tensor]], torch.optim.Optimizer] = sgd
    cross: bool = True
    policy: str = "fifo"
    timeout_s: float = 100.0
    bucket_bytes: int = 600
    chunk_bytes: int = 300
    ddp: dict[str, Any] = field(default_factory=dict)
    observers: Sequence[Observer] = ()
    #: what the script has read
    seen: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model: Any = DistributedDataParallel(self.make(), **self.ddp)
        renew(self.model, self.bucket_bytes)
        self.optimizer = self.optimizer_of(self.model.parameters())
        self.steps = 0
        self.slots = [Slot(*named) for named in self.model.named_parameters()]
        if self.wire is None:
            return
        self.session: Any = PlannedSession(
            self.model,
            self.model,
            self.slots,
            Config(policy=self.policy, timeout_s=self.timeout_s),
            self.wire,
            Observers(self.observers),
            cut=partial(ends_of, chunk_bytes=self.chunk_bytes),
            setting=Setting(self.chunk_bytes, 2 * self.chunk_bytes),
        )
        self.session.add_optimizer(self.optimizer, type(self.optimizer), cross=self.cross)
        if self.order is not None:
            self.order.names.append(self._names)
            self.order.slots += self.slots
            self.order.may_copy.append(lambda: self.session.source.phase.name == "COMPLETE")

    def _names(self) -> Iterator[tuple[str, Tensor]]:
        for slot in self.slots:
            yield slot.name, slot.parameter
            if (grad := slot.parameter.grad) is not None:
                yield f"{slot.name}.grad", grad
        for bucket in self.session.source.buckets:
            for member in bucket.members:
                yield f"{member.name} in its bucket", member.view

    def plan_when_settled(self, plan: Callable[[int], list[int]]) -> None:
        """Once DDP's buckets stay, chunks are issued in an order that is made of their number."""
        source = self.session.source
        begins = self.session.round_begins

        def round_begins() -> None:
            if not source.is_early and self.session._planning.order is None and self.chunks:
                self.session._planning.order = plan(len(self.chunks))
            begins()

        self.session.round_begins = round_begins

    @property
    def crossed(self) -> int:
        """How many steps were taken before all gradients had come."""
        return int(self.session.stats()["barrier_crossed_steps"])

    @property
    def chunks(self) -> list[Any]:
        return [chunk for bucket in self.session.source.buckets for chunk in bucket.chunks]

    def backward(self) -> None:
        self.model(inputs(self.steps)).square().mean().backward()
        self.steps += 1

    def train(self, steps: int = 1, *, set_to_none: bool = True) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad(set_to_none=set_to_none)
            self.backward()
            self.optimizer.step()

    def see(self, *values: Any) -> None:
        self.seen += [value.detach().clone() for value in values]

    def let(self, *, but: int = 0) -> None:
        """What is under way has come, but for the last chunks."""
        if self.wire is not None:
            self.wire.let(but=but)

    @property
    def held(self) -> list[str]:
        """Parameters that wait."""
        return [slot.name for slot in self.slots if type(slot.parameter) is PendingParameter]

    @property
    def pending(self) -> list[str]:
        """Parameters whose gradients wait."""
        return [slot.name for slot in self.slots if type(slot.parameter.grad) is PendingGrad]

    def differences(self, plain: Run) -> list[str]:
        """What is not as in a plain run: numbers that were seen, parameters and their state."""
        self.session.flush()
        found = [f"{name} waits after a flush" for name in (*self.held, *self.pending)]
        found += [
            f"what was seen {number}. differs"
            for number, (mine, theirs) in enumerate(zip(self.seen, plain.seen, strict=True))
            if not torch.equal(mine, theirs)
        ]
        theirs_by_name = dict(plain.model.named_parameters())
        for name, parameter in self.model.named_parameters():
            theirs = theirs_by_name[name]
            if not torch.equal(parameter, theirs):
                found.append(f"{name} differs")
            state, other = self.optimizer.state[parameter], plain.optimizer.state[theirs]
            if any(not torch.equal(state[key], other[key]) for key in other):
                found.append(f"the state of {name} differs")
        return found

    def close(self) -> None:
        self.session.close()
