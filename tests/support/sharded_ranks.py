"""Ranks of a sharded session in this process, and the plain training that they have to equal."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from looped import SMALL, TIMEOUT_S, mlp
from together import together
from torch import Tensor, nn
from torch.optim import Optimizer

from bytesched.config import Config
from bytesched.errors import PeerLost
from bytesched.observe import Observers
from bytesched.plugins.engine.beginning import add_optimizer, why_whole
from bytesched.plugins.engine.session import Session
from bytesched.plugins.layout.plan import Ownership, Plan
from bytesched.plugins.layout.slots import Slot
from bytesched.plugins.routes.carrier import Traffic
from bytesched.plugins.routes.split.turns import Sent
from bytesched.plugins.zero1.lockstep import Place
from bytesched.plugins.zero1.sharding import Listener
from bytesched.scheduler import EventThread
from bytesched.task import CommTask
from bytesched.testing import Loopback

_T = TypeVar("_T")

#: of the parameters of `looped.mlp`, in forward order; None: half of it is each rank's
OWNERS: tuple[int | None, ...] = (None, 0, 1, 1, 0, 1)


class Wire:
    """Joins two ranks: sums go to owners, what these send to the others, words to all.

    What a rank does not own of a sum is not a number there.
    """

    def __init__(self, owners: Sequence[int | None] = OWNERS) -> None:
        self.loopback = Loopback(2, timeout_s=TIMEOUT_S)
        self.owners = owners
        self.ranks: dict[int, WireCarrier] = {}
        #: of questions that were not answered, by who asks and who answers
        self.asked: dict[tuple[int, int], deque[SimpleQueue[bytes]]] = defaultdict(deque)
        self.ended = [threading.Event(), threading.Event()]
        self.words = EventThread()
        self._met = threading.Barrier(2)
        self._lock = threading.Lock()
        self._held: list[Callable[[], None]] | None = None

    def wrap(self, rank: int, model: nn.Module, *optimizers: Optimizer, **fields: Any) -> Session:
        """A session of ``rank`` for a plain module; ``fields`` are those of Config."""
        config = Config(shard=True, **{**SMALL, **fields})
        session = Session(
            model,
            [Slot(name, parameter) for name, parameter in model.named_parameters()],
            config,
            backend=self.loopback.backends[rank],
            sync=lambda: True,
            find_unused=False,
            static_graph=False,
            observers=Observers(),
            sharder=_Sharder(self, rank),
        )
        for optimizer in optimizers:
            kind = type(optimizer)
            add_optimizer(session, optimizer, kind, why_whole(model, optimizer, kind, config))
        return session

    def run(self, work: Callable[[int], _T]) -> list[_T]:
        """What ``work(rank)`` returns on both ranks; when one fails, the other ends."""

        def one(rank: int) -> _T:
            try:
                return work(rank)
            except BaseException as error:
                lost = PeerLost(f"rank {rank} gave up: {error}")
                self.loopback.abort(lost)
                for carrier in self.ranks.values():
                    carrier.progress.fail(lost)
                raise

        return together(one, 2)

    def hold(self) -> None:
        """What owners send does not leave, until `release`."""
        with self._lock:
            self._held = self._held or []

    def release(self) -> None:
        """It leaves."""
        with self._lock:
            held, self._held = self._held or [], None
        for send in held:
            send()

    def send(self, send: Callable[[], None]) -> None:
        """Calls ``send`` as soon as nothing is held."""
        with self._lock:
            if self._held is not None:
                self._held.append(send)
                return
        send()

    def tell(self, rank: int, say: Callable[[Listener], None]) -> None:
        """``say`` is called with the owners of ``rank``."""
        self.words.put(say, self.ranks[rank].owners)

    def join(self, carrier: WireCarrier) -> None:
        """Returns when both ranks are there."""
        self.ranks[carrier.rank] = carrier
        self._met.wait(TIMEOUT_S)

    def close(self) -> None:
        """Ends its threads."""
        self.loopback.close()
        self.words.close()
        assert self.words.join(TIMEOUT_S)


class WireCarrier:
    """One rank's end of it (see sharding.ShardedCarrier), and what was carried."""

    order = "wire"

    def __init__(
        self, wire: Wire, rank: int, plan: Plan, progress: Any, owners: Listener, whole: Any
    ) -> None:
        self.rank = rank
        self.owners = owners
        self.progress = progress
        self._wire = wire
        self._plan = plan
        self._sums = whole
        self._turn = 0
        self._coming: Mapping[CommTask, Sequence[slice]] = {}
        self._staged: dict[tuple[int, int], Tensor] = {}
        #: of what came from owners: what it was, and of which chunk
        self.expected: list[tuple[Sent, int]] = []
        #: whom this rank asked
        self.questions: list[int] = []

    @property
    def traffic(self) -> Traffic:
        return Traffic()

    def queries(self, func: Any, args: Any, kwargs: Any) -> Any:
        return NotImplemented

    def submit(self, chunk: CommTask) -> None:
        self._sums.submit(chunk)

    def story(self) -> str:
        return "as the wire has it"

    def lost(self) -> BaseException | None:
        return None

    def arm(
        self, turn: int, leaving: Sequence[CommTask], coming: Mapping[CommTask, Sequence[slice]]
    ) -> None:
        self._turn, self._coming = turn, coming

    def expect(self, chunks: Iterable[CommTask], sent: Sent) -> None:
        for chunk in chunks:
            self.expected.append((sent, chunk.index))
            self._expect(chunk, self._plan.buffers[chunk.index], self._coming[chunk])

    def _expect(self, chunk: CommTask, buffer: Tensor, parts: Sequence[slice]) -> None:
        memory = torch.zeros_like(buffer)

        def came(error: BaseException | None) -> None:
            if error is not None:
                self.progress.fail(error)
                return
            for part in parts:
                buffer[part].copy_(memory[part])
            self.owners.gathered(chunk)

        self._wire.loopback.add(f"{self._turn}: {chunk.index}", self.rank, lambda: memory, came)

    def stage(self, chunk: CommTask, turn: int) -> Tensor:
        return self._staged.setdefault(
            (turn, chunk.index), torch.zeros_like(self._plan.buffers[chunk.index])
        )

    def spread(self, chunk: CommTask, turn: int) -> None:
        memory = self._staged.pop((turn, chunk.index))

        def left(error: BaseException | None) -> None:
            if error is None:
                self.owners.spread(chunk)

        def send() -> None:
            self._wire.loopback.add(f"{turn}: {chunk.index}", self.rank, lambda: memory, left)

        self._wire.send(send)

    def ask(self, questions: Mapping[int, bytes], *, task: str) -> Iterator[tuple[int, bytes]]:
        for rank, question in questions.items():
            answer: SimpleQueue[bytes] = SimpleQueue()
            self.questions.append(rank)
            self._wire.asked[self.rank, rank].append(answer)
            self._wire.tell(rank, lambda owners: owners.asked(self.rank, question))  # noqa: B023
            yield rank, answer.get(timeout=TIMEOUT_S)

    def answer(self, rank: int, answer: bytes) -> None:
        self._wire.asked[rank, self.rank].popleft().put(answer)

    def announce(self, place: Place, is_last: bool) -> None:
        self._wire.tell(1 - self.rank, lambda owners: owners.heard(self.rank, place, is_last))
        if is_last:
            self._wire.ended[self.rank].set()

    def leave(self, limit_s: float) -> list[int]:
        other = 1 - self.rank
        return [] if self._wire.ended[other].wait(limit_s) else [other]

    def begin_round(self) -> None:
        pass

    def backward_ends(self) -> None:
        pass

    def end_round(self) -> None:
        pass

    def close(self) -> None:
        self._sums.close()


class _Sharder:
    """Makes these carriers (see sharding.Sharder)."""

    def __init__(self, wire: Wire, rank: int) -> None:
        self._wire = wire
        self._rank = rank

    def cut(
        self, plan: Plan, partition_bytes: int, kinds: Sequence[int], may_cut: Sequence[bool]
    ) -> None:
        bounds = {
            position: (slot.elements // 2, slot.elements)
            for position, slot in enumerate(plan.slots)
            if self._wire.owners[position] is None
        }
        assert all(may_cut[position] for position in bounds)
        plan.cut(partition_bytes, Ownership(2, self._wire.owners, kinds, bounds))

    def carrier(
        self,
        plan: Plan,
        packer: Any,
        context: Any,
        setting: Any,
        owners: Listener,
        *,
        reduced: Callable[[CommTask], None],
    ) -> Any:
        def summed(chunk: CommTask) -> None:
            if plan.owners[chunk.index] != self._rank:
                plan.buffers[chunk.index].fill_(torch.nan)
            reduced(chunk)

        sums = self._wire.loopback.backends[self._rank].carrier(
            plan,
            packer,
            context.streams,
            setting,
            reduced=summed,
            failed=context.progress.fail,
            observers=context.observers,
        )
        carrier = WireCarrier(self._wire, self._rank, plan, context.progress, owners, sums)
        self._wire.join(carrier)
        return carrier


def inputs(step: int, rank: int) -> Tensor:
    """What ``rank`` trains on."""
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * rank + step))


class Averaged:
    """Plain training on the mean of what two ranks would have."""

    def __init__(self, optimizer_of: Callable[[nn.Module], Optimizer]) -> None:
        self.model = mlp()
        self.optimizer = optimizer_of(self.model)

    def backward(self, step: int) -> None:
        """As DDP: what there is is added to on each rank, and averaged."""
        parameters = list(self.model.parameters())
        before = [None if p.grad is None else p.grad.clone() for p in parameters]
        found: list[list[Tensor]] = []
        for rank in range(2):
            for parameter, grad in zip(parameters, before, strict=True):
                parameter.grad = None if grad is None else grad.clone()
            self.model(inputs(step, rank)).square().mean().backward()
            found.append([p.grad for p in parameters if p.grad is not None])
        for parameter, mine, other in zip(parameters, *found, strict=True):
            parameter.grad = mine / 2 + other / 2

    def train(self, steps: int, first: int = 0) -> None:
        """So many steps."""
        for step in range(first, first + steps):
            self.optimizer.zero_grad()
            self.backward(step)
            self.optimizer.step()


class Rank:
    """One rank's training, whose session is made in the test's thread, as models are seeded."""

    def __init__(
        self,
        wire: Wire,
        rank: int,
        optimizer_of: Callable[[nn.Module], Optimizer],
        **fields: Any,
    ) -> None:
        self.wire = wire
        self.rank = rank
        self.model: Any = mlp()
        self.parameters: list[Any] = list(self.model.parameters())
        self.optimizer = optimizer_of(self.model)
        self.session: Session = wire.wrap(rank, self.model, self.optimizer, **fields)

    @property
    def carrier(self) -> WireCarrier:
        return self.wire.ranks[self.rank]

    def backward(self, step: int) -> None:
        """A forward and a backward pass."""
        self.model(inputs(step, self.rank)).square().mean().backward()

    def train(self, steps: int, first: int = 0) -> None:
        """So many steps."""
        for step in range(first, first + steps):
            self.optimizer.zero_grad()
            self.backward(step)
            self.optimizer.step()

    def end(self) -> None:
        """Everything is applied, and the session ends."""
        self.session.flush()
        self.session.close()


def both(wire: Wire, optimizer_of: Callable[[nn.Module], Optimizer], **fields: Any) -> list[Rank]:
    """One of each rank."""
    return [Rank(wire, rank, optimizer_of, **fields) for rank in range(2)]
