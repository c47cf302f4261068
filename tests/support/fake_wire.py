"""A wire in one process, and models that are planned over it.

A sum is made when somebody waits for it, or the test lets it: whoever reads too early reads other
numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from operator import eq
from typing import Any

import torch
import torch.distributed as dist
from access_order import Order
from fake_cuda import CUDA, Clock
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from bytesched.config import Config
from bytesched.errors import SchedulerTimeout
from bytesched.observe import Observers
from bytesched.plugins.planned.beginning import add_optimizer, why_whole
from bytesched.plugins.planned.buckets import Bucket
from bytesched.plugins.planned.bundles import Slot
from bytesched.plugins.planned.cutting import cut_whole
from bytesched.plugins.planned.ddp_session import DdpSession
from bytesched.plugins.planned.hooked_session import HookedSession
from bytesched.plugins.planned.reducer import renew
from bytesched.plugins.planned.terms import Terms
from bytesched.plugins.planned.wire import HOST
from bytesched.plugins.proxies.pending import PendingParameter
from bytesched.plugins.proxies.pending_grads import PendingGrad
from bytesched.tunable import Setting

__all__ = ["FakeWire", "FakeWork", "Run", "alone", "inputs", "mlp", "sgd", "trained"]


# -- the wire --------------------------------------------------------------------------


class FakeWork:
    """A sum that is under way until it is finished."""

    def __init__(self, make: Callable[[], None], clock: Clock) -> None:
        self._make = make
        #: its place
        self.clock = clock
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
        self.sees_ends = not has_streams
        self.size = size
        self.timeout_s = 100.0
        self.levels = 1
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

    def start(self, tensor: Tensor, key: str = "") -> FakeWork:
        self.started.append(tensor)
        # A device's carrier sums one after the other; of several on a host, any may be the last.
        last = self.works[-1].clock if self.works and self.has_streams else Clock()
        clock = Clock() if self._order is None else self._order.starts(tensor, last)
        self.works.append(FakeWork(partial(self._sum, tensor), clock))
        return self.works[-1]

    def _sum(self, tensor: Tensor) -> None:
        with self._unnoticed():
            # No version is counted: a back end counts none.
            tensor.data.mul_(self.size)

    def _unnoticed(self) -> AbstractContextManager[None]:
        return nullcontext() if self._order is None else self._order.off()

    def start_largest(self, numbers: Tensor) -> FakeWork:
        place = len(self.told)
        self.told.append(numbers.tolist())

        def largest() -> None:
            with self._unnoticed():
                tables = [torch.tensor(rank.told[place]).to(numbers) for rank in self._ranks]
                numbers.copy_(torch.stack(tables).amax(0))

        return FakeWork(largest, Clock())

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

    def wait_left(self, works: Iterable[Any]) -> None:
        """Nothing of a fake ends by itself."""

    def leave_note(self, text: str) -> None:
        self.notes.append(text)

    def abort(self) -> None:
        self.is_aborted = True

    def close(self) -> None:
        self.is_closed = True


# -- what is trained -------------------------------------------------------------------


@contextmanager
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def mlp() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 4))


def inputs(step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


def sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


#: DDP's own, of which it refuses one by its name on Gloo, though that works there
_HOOKS: dict[str, Any] = {
    "bf16": lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket),
    "fp16": default_hooks.fp16_compress_hook,
}


class Around(nn.Module):
    """A plain module in DDP's place."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, input: Tensor) -> Any:
        return self.module(input)


@dataclass
class Run:
    wire: FakeWire | None = None
    order: Order | None = None
    make: Callable[[], nn.Module] = mlp
    optimizer_of: Callable[[Iterable[Tensor]], torch.optim.Optimizer] = sgd
    cross: bool = True
    policy: str = "fifo"
    compression: str = "none"
    guard: bool = True
    timeout_s: float = 100.0
    #: a plain module, and no DDP; parameters of it may get no gradient
    is_plain: bool = False
    find_unused: bool = False
    bucket_bytes: int = 600
    chunk_bytes: int = 300
    ddp: dict[str, Any] = field(default_factory=dict)
    #: what the script has read
    seen: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model: Any
        if self.is_plain:
            self.model = Around(self.make())
        else:
            self.model = DistributedDataParallel(self.make(), **self.ddp)
            renew(self.model, self.bucket_bytes)
        self.optimizer = self.optimizer_of(self.model.parameters())
        self.steps = 0
        self.slots = [Slot(*named) for named in self.model.named_parameters()]
        if self.wire is None:
            if self.compression != "none" and not self.is_plain:
                self.model.register_comm_hook(None, _HOOKS[self.compression])
            return
        self.config = config = Config(
            policy=self.policy,
            timeout_s=self.timeout_s,
            compression=self.compression,
            cross_barrier=self.cross,
            guard=self.guard,
        )
        setting = Setting(self.chunk_bytes, 2 * self.chunk_bytes)
        terms = Terms(self.slots, config, self.wire, Observers(), setting)
        self.session: Any
        if self.is_plain:
            self.session = HookedSession(
                self.model, terms, sync=lambda: True, find_unused=self.find_unused
            )
        else:
            self.session = DdpSession(
                self.model, self.model, terms, cut=partial(cut_whole, chunk_bytes=self.chunk_bytes)
            )
        self.add_optimizer(self.optimizer)
        if self.order is not None:
            self.order.names.append(self._names)
            self.order.slots += self.slots
            self.order.may_copy.append(lambda: self.session.source.phase.name == "COMPLETE")
            rounds = self.session
            rounds.round_ends = partial(self._round_ends, self.order, rounds.round_ends)
            if (coding := rounds.sending._coding) is not None:
                coding.decode = self.order.bringing()(coding.decode)

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Another one of the session, if there is one."""
        if self.wire is not None:
            kind = type(optimizer)
            why = why_whole(self.model, optimizer, kind, self.config)
            add_optimizer(self.session, optimizer, kind, why)

    @staticmethod
    def _round_ends(
        order: Order, ends: Callable[..., None], buckets: Sequence[Bucket], *, is_early: bool
    ) -> None:
        for bucket in buckets:
            for member in bucket.members if bucket.is_under_way else ():
                if not bucket.holds_gradients and (grad := member.parameter.grad) is not None:
                    order.leaves_unsummed(grad)
        ends(buckets, is_early=is_early)

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
        rounds = self.session
        begins = rounds.round_begins

        def round_begins() -> None:
            if not rounds.source.is_early and rounds.planning.order is None and self.chunks:
                rounds.planning.order = plan(len(self.chunks))
            begins()

        rounds.round_begins = round_begins

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
        return [slot.name for slot in self.slots if type(slot.parameter) is PendingParameter]

    @property
    def pending(self) -> list[str]:
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
            for key, value in other.items():
                same = torch.equal if torch.is_tensor(value) else eq
                if not same(state[key], value):
                    found.append(f"the state of {name} differs")
        return found

    def close(self) -> None:
        self.session.close()


def trained(rounds: int, **options: Any) -> Run:
    """A plain one that is so many rounds old."""
    plain = Run(**options)
    plain.train(rounds)
    return plain
