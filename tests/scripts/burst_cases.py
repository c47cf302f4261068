"""What ranks do in the tests of the burst runtime."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from raised import leaving, raised, told
from rank_worker import die_at, gloo_threads, gloo_threads_left, signals
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from bytesched.burst.cost import Place, PlacedBranches, Plan
from bytesched.errors import PeerLost
from bytesched.plugins.burst import Background, Branched, Burst
from bytesched.plugins.burst.moves import Move, Moves
from bytesched.plugins.planned.session import PlannedSession
from bytesched.plugins.routes.opening import open_gloo

BATCH = 8
STEPS = 4
CLASSES = 5
DIED = 7
SHARED_STEPS = 16
# Small pieces, so that each group of ranks has several.
SETTINGS: dict[str, Any] = {"partition_bytes": 2048, "credit_bytes": 4096, "timeout_s": 100.0}

ONE, TWO, FOUR = Place(0, 1), Place(0, 2), Place(0, 4)


def vgg_like() -> nn.Sequential:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.0)),
        nn.Linear(32, CLASSES),
    )


def resnet_like() -> nn.Sequential:
    def block(n: int, stride: int) -> Branched:
        body = nn.Sequential(
            nn.Sequential(nn.Conv2d(8, n, 3, stride, 1, bias=False), nn.GroupNorm(2, n), nn.ReLU()),
            nn.Sequential(nn.Conv2d(n, n, 3, 1, 1, bias=False), nn.GroupNorm(2, n)),
        )
        if stride == 1:
            return Branched(body, nn.Sequential())
        return Branched(body, nn.Sequential(nn.Conv2d(8, n, 1, stride, bias=False)))

    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        block(8, 1),
        block(12, 2),
        nn.Sequential(nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, CLASSES)),
    )


def inception_like() -> nn.Sequential:
    def conv(a: int, b: int, size: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(a, b, size, padding=size // 2), nn.ReLU())

    forked = Branched(nn.Sequential(conv(4, 2, 1)), nn.Sequential(conv(4, 3, 3)), join="concat")
    block = Branched(
        nn.Sequential(conv(6, 4, 1), conv(4, 4, 3)),
        nn.Sequential(conv(6, 3, 1)),
        nn.Sequential(conv(6, 4, 1), forked),
        nn.Sequential(),
        join="concat",
    )
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(18, CLASSES))
    return nn.Sequential(conv(3, 6, 3), block, head)


def lanes_plan(first: Place, last: Place) -> Plan:
    """The third branch forks in a lane of its own; the shortcut stays."""
    beside, alone = Place(2, 1), Place(3, 1)
    fork = PlacedBranches(((beside,), (beside,)), (0, 0), beside)
    branches = ((TWO, ONE), (alone,), (beside, fork), ())
    return (first, PlacedBranches(branches, (0, 2, 1, 0), last), last)


#: model and plan by name
CASES: dict[str, tuple[Callable[[], nn.Sequential], Plan]] = {
    "vgg": (vgg_like, (FOUR, TWO, ONE, FOUR)),
    "vgg-narrow-first": (vgg_like, (ONE, FOUR, TWO, ONE)),
    "vgg-uniform": (vgg_like, (FOUR, FOUR, FOUR, FOUR)),
    "vgg-on-two-ranks": (vgg_like, (TWO, TWO, TWO, TWO)),
    "resnet": (
        resnet_like,
        (
            FOUR,
            PlacedBranches(((TWO, FOUR), ()), (0, 0), FOUR),
            PlacedBranches(((TWO, ONE), (Place(2, 2),)), (0, 1), TWO),
            ONE,
        ),
    ),
    "inception": (inception_like, lanes_plan(FOUR, TWO)),
    "inception-narrow-first": (inception_like, lanes_plan(ONE, FOUR)),
}


def batch(step: int, edges: Sequence[int] = (8,)) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    edge = edges[step % len(edges)]
    images = torch.randn(BATCH, 3, edge, edge, generator=generator, dtype=torch.float64)
    return images, torch.randint(CLASSES, (BATCH,), generator=generator)


def optimizer_for(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def mean_over_ranks(loss: Tensor | None) -> float:
    total = torch.zeros(2, dtype=torch.float64)
    if loss is not None:
        total += torch.stack([loss.detach(), torch.ones((), dtype=torch.float64)])
    dist.all_reduce(total)
    return float(total[0] / total[1])


def burst_of(
    name: str = "vgg",
    *,
    model: nn.Sequential | None = None,
    plan: Plan | None = None,
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = optimizer_for,
    **fields: Any,
) -> Burst:
    """The case, but for what else is given."""
    make, usual = CASES[name]
    model = make().double() if model is None else model
    return Burst(
        model, plan or usual, optimizer, functional.cross_entropy, **{**SETTINGS, **fields}
    )


def equals_data_parallel(name: str, edges: Sequence[int] = (8,)) -> dict[str, Any]:
    """The figures of a burst that was found to train as DDP does."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    inner = CASES[name][0]().double()
    # Rank 0's parameters are everybody's, and they are to be those of the run below.
    torch.manual_seed(3 + rank)
    with burst_of(name) as burst:
        burst.model.load_state_dict(inner.state_dict())
        losses = [mean_over_ranks(burst.step(*batch(step, edges))) for step in range(STEPS)]
        burst.gather()
        found, figures = dict(burst.model.state_dict()), burst.stats()
    model = DistributedDataParallel(inner)
    optimizer = optimizer_for(list(model.parameters()))
    expected_losses = []
    for step in range(STEPS):
        images, labels = batch(step, edges)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images[rank::size]), labels[rank::size])
        loss.backward()
        optimizer.step()
        expected_losses.append(mean_over_ranks(loss))
    torch.testing.assert_close(losses, expected_losses, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, dict(inner.state_dict()), rtol=1e-9, atol=1e-12)
    return figures


def first_weights_are_rank_0s() -> list[float]:
    torch.manual_seed(dist.get_rank())
    with burst_of(model=vgg_like()) as burst:
        return [float(p.detach().sum()) for p in burst.model.parameters()]


def refused(what: str) -> str:
    """What was said, and that nothing stays open, also while the error is kept."""
    model, plan, fields = vgg_like(), CASES["vgg"][1], dict[str, Any]()
    if what == "ranks":
        plan = (Place(0, 8), *plan[1:])
    elif what == "first":
        plan = (PlacedBranches((), (), FOUR), *plan[1:])
    elif what == "length":
        plan = plan[1:]
    elif what == "norm":
        model[3] = nn.Sequential(nn.Linear(32, CLASSES), nn.BatchNorm1d(CLASSES))
    elif what == "shared":
        model[2], model[3] = nn.Linear(64, 64), nn.Linear(64, 64)
        model[3].weight = model[2].weight
    elif what == "join":
        model, block = resnet_like(), PlacedBranches(((TWO, FOUR), ()), (0, 0), Place(0, 8))
        plan = (FOUR, block, *CASES["resnet"][1][2:])
    elif what == "models" and dist.get_rank() == 3:
        # No other rank trains this layer, so that no session would notice.
        model[2] = nn.Sequential(nn.Flatten(), nn.Linear(64, 40))
    elif what == "plans" and dist.get_rank() == 3:
        plan = (FOUR, FOUR, ONE, FOUR)
    elif what == "settings" and dist.get_rank() == 3:
        fields = {"compression": "bf16"}
    return leaving(lambda: burst_of(model=model, plan=plan, **fields))


def first_broadcast_fails() -> str:
    before = gloo_threads()
    failing = mock.Mock(side_effect=MemoryError("no room"))
    patched = mock.patch("bytesched.plugins.routes.group.Group.broadcast", failing)
    fails = dist.get_rank() == 3
    with patched if fails else nullcontext():
        # While the error is kept; those of the others hold an operation, and that its group.
        said = (leaving if fails else told)(lambda: burst_of(model=vgg_like()))
    return f"{said} and left {gloo_threads_left(before)} threads"


def used_after_it_was_closed() -> list[str]:
    burst = burst_of(timeout_s=600.0)
    burst.step(*batch(0))
    burst.close()
    uses = (lambda: burst.step(*batch(1)), lambda: burst(batch(1)[0]), burst.gather)
    return [raised(use) for use in uses]


class Job:
    """A background job that learns something, in short steps."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)
        self.weight = torch.zeros(8, requires_grad=True)
        self.losses: list[float] = []

    def step(self) -> None:
        x = torch.randn(8, generator=self.generator)
        loss = (self.weight @ x - x.sum()).square()
        loss.backward()
        with torch.no_grad():
            assert self.weight.grad is not None
            self.weight -= 0.01 * self.weight.grad
        self.weight.grad = None
        self.losses.append(float(loss.detach()))


def shares_its_gaps(timeline: str) -> int:
    """How many background steps ran, after a look at what both jobs came to."""
    states = []
    job = Job()
    for shared in (False, True):
        torch.manual_seed(3)
        fields: dict[str, Any] = {"timeline": timeline} if shared else {}
        with Background(job.step) as background, burst_of(**fields) as burst:
            if shared:
                burst.share(background)
            for step in range(SHARED_STEPS):
                burst.step(*batch(step % STEPS))
            burst.gather()
            states.append(dict(burst.model.state_dict()))
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-9, atol=1e-12, msg=name)
    alone = Job()
    for _ in job.losses:
        alone.step()
    assert alone.losses == job.losses
    assert background.steps == len(job.losses)
    return len(job.losses)


def loses_its_last_step(closes: bool, is_known: bool) -> None:
    """The updates that are outstanding fail; says what ``close()`` raises, if it is called.

    Args:
        is_known: it fails beside the script, before anything waits for it.
    """
    burst = burst_of()
    burst.step(*batch(0))
    lost = PeerLost("rank 9 is gone")
    if is_known:
        for session in burst._sessions.values():
            session._failures.fail(lost)
        burst._moves.progress.fail(lost)
    else:
        mock.patch.object(PlannedSession, "flush", side_effect=lost).start()
    if closes:
        print(raised(burst.close), flush=True)
        burst.close()
    dist.barrier()


def raised_by_its_step() -> None:
    burst = burst_of()
    burst._moves.progress.fail(PeerLost("rank 9 is gone"))
    print(raised(lambda: burst.step(*batch(0))), flush=True)
    burst.close()


def loses_a_rank(victim: int) -> None:
    burst = burst_of()

    def train() -> None:
        for step in range(50):
            if step == 3 and dist.get_rank() == victim:
                os._exit(DIED)
            burst.step(*batch(step))

    print(told(train))
    burst.close()
    dist.destroy_process_group()


class _Wide(nn.Module):
    """Hands on so much of a sample that sending it takes far longer than its receiver lives."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x.expand(-1, 1 << 26) * self.weight


class _Narrow(_Wide):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1, keepdim=True) * self.weight


def dies_while_it_receives() -> None:
    """Rank 0 is killed with the last move half received; the other says what it saw."""
    start, sending = Moves._start, signals()

    def start_and_say(self: Moves, move: Move, *messages: Any) -> None:
        start(self, move, *messages)
        if move.name == "from 1":
            sending.set("sending")

    if dist.get_rank():
        mock.patch.object(Moves, "_start", start_and_say).start()
    else:
        die_at("sending")
    model, plan = nn.Sequential(_Wide(), _Narrow()), (Place(0, 1), Place(1, 1))
    fields = SETTINGS | {"timeout_s": 300.0}
    burst = Burst(model, plan, optimizer_for, functional.mse_loss, **fields)
    burst.step(torch.ones(1, 1), torch.ones(1, 1))
    print(told(burst.gather), flush=True)
    burst.close()
    dist.destroy_process_group()


def is_kept_waiting() -> str:
    """What the others say when rank 3 stays away from the third step until they have given up."""
    burst = burst_of(timeout_s=2.0)
    gave_up = signals()

    def train() -> None:
        for step in range(6):
            if step == 3 and dist.get_rank() == 3:
                gave_up.wait("gave up")
            burst.step(*batch(step))

    said = raised(train)
    gave_up.set("gave up")
    burst.close()
    return said


#: ranks 2 and 3 connect first, then all
NARROW_FIRST = (Place(2, 2), FOUR, ONE, FOUR)


def makes_no_optimizer() -> str:
    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        if dist.get_rank() == 3:
            raise RuntimeError("no optimizer")
        return optimizer_for(parameters)

    return leaving(lambda: burst_of(plan=NARROW_FIRST, optimizer=optimizer, timeout_s=600.0))


def does_not_connect(at: int, dies: bool = False) -> str:
    """Rank 3 fails at one of the groups that it opens for gradients, or dies: what all say."""
    opened = 0

    def fail(*args: Any, **named: Any) -> Any:
        nonlocal opened
        opened += 1
        if opened == at:
            if dies:
                os._exit(DIED)
            raise MemoryError("no room")
        return open_gloo(*args, **named)

    return _opening_by(fail, timeout_s=600.0)


def _opening_by(open_group: Callable[..., Any], **fields: Any) -> str:
    patched = mock.patch("bytesched.plugins.burst.groups.open_gloo", open_group)
    with patched if dist.get_rank() == 3 else nullcontext():
        return leaving(lambda: burst_of(plan=NARROW_FIRST, **fields))


def dies_while_others_connect() -> None:
    print(does_not_connect(1, dies=True), flush=True)
    dist.destroy_process_group()


def does_not_come() -> str:
    """Rank 3 stays away while sets of ranks connect: what the ranks say that wait for it."""
    gave_up = signals()

    def stay_away(*_: Any, **__: Any) -> Any:
        gave_up.wait("gave up")
        raise RuntimeError("lost")

    said = _opening_by(stay_away, timeout_s=2.0)
    gave_up.set("gave up")
    return said


def closes_while_another_is_behind() -> list[float]:
    """Rank 0 gets to what the others send in their last backward pass when they close."""
    closing = signals()

    def fall_behind(*_: object) -> None:
        closing.wait("closing")
        # The others need a moment to do harm.
        time.sleep(0.3)

    burst = burst_of(plan=(ONE, FOUR, FOUR, FOUR))
    burst.step(*batch(0))
    if dist.get_rank() == 0:
        burst.model[1].register_full_backward_hook(fall_behind)
    before = [float(p.detach().sum()) for p in burst.model[0].parameters()]
    burst.step(*batch(1))
    if dist.get_rank() != 0:
        closing.set("closing")
    burst.close()
    after = [float(p.detach().sum()) for p in burst.model[0].parameters()]
    return [a - b for a, b in zip(after, before, strict=True)]


class _Unlucky(nn.Module):
    """Raises in the third forward pass with samples."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += not x.is_meta
        if self.calls == 3 and dist.get_rank() == 2:
            raise RuntimeError("out of luck")
        return x


def raises_on_one_rank() -> str:
    model = vgg_like().double()
    model[0] = nn.Sequential(model[0], _Unlucky())
    burst = burst_of(model=model)

    def train() -> None:
        for step in range(10):
            burst.step(*batch(step))

    said = raised(train, Exception)
    burst.close()
    return said.partition("\n")[0]
