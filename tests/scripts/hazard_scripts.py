"""Training scripts that read while nothing of their step has arrived.

Whatever is read then must be what plain DDP would have shown, so it waits; what says nothing about
values must not wait. They run on a wire on which no sum begins before somebody waits for it, or
one rank reads while its peer has not even begun its backward pass.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from looks import BEFORE_STEP, LOOKS, WITHOUT_VALUES, weight
from rank_worker import signals
from round_ways import HeldWork
from scripts_models import Attention, Checkpointed, RawLinear, encoder, read_raw
from scripts_optimizers import SignDescent
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.optim.lr_scheduler import StepLR
from training import Job, adamw, backward, mlp, sgd, train

#: The first iteration is special, and so may be the one after it.
FREE_STEPS = 3


class Peer:
    """Holds back the ranks that do not read, from before their backward until they are let go."""

    def __init__(self, job: Job, reader: int) -> None:
        self.reads = job.wrapped and job.rank == reader
        self._held = job.wrapped and job.rank != reader

    def hold(self, name: str = "go") -> None:
        """On a rank that does not read: wait to be let go."""
        if self._held:
            signals().wait(name)

    def let_go(self, name: str = "go") -> None:
        if self.reads:
            signals().set(name)


@contextlib.contextmanager
def waiting(job: Job, name: str, *, waits: bool = True) -> Iterator[None]:
    """What is done inside waits for sums that are held, or for none."""
    before = HeldWork.begun
    yield
    assert not job.wrapped or (HeldWork.begun > before) == waits, name


def looks(job: Job, kind: str, one_in: int) -> None:
    for name, look in list(LOOKS[kind].items())[::one_in]:
        model, optimizer = job.begin(adamw)
        free_steps(job, model, optimizer)
        backward(job, model, FREE_STEPS)
        if kind not in BEFORE_STEP:
            optimizer.step()
        with waiting(job, name, waits=kind not in WITHOUT_VALUES):
            job.record(name, look(model, optimizer))
        if kind in BEFORE_STEP:
            optimizer.step()
        train(job, model, optimizer, steps=2, first_step=FREE_STEPS + 1)
        job.record_state(model, optimizer)
        job.unwrap(optimizer)


def free_steps(job: Job, model: Any, optimizer: Any) -> None:
    train(job, model, optimizer, steps=FREE_STEPS)
    optimizer.zero_grad()


def held_backward(job: Job, peer: Peer, model: Any, name: str = "go") -> Tensor:
    """Forward and backward of one step, the backward held on the ranks that do not read."""
    loss: Tensor = model(job.inputs(FREE_STEPS)).square().mean()
    peer.hold(name)
    loss.backward()
    return loss


def crossing(job: Job, reader: int) -> None:
    """The reader goes through whole steps, up to the next forward, with the peer held back."""
    peer = Peer(job, reader)
    model, optimizer = job.begin(adamw)
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    free_steps(job, model, optimizer)
    for step in range(3):
        held_backward(job, peer, model, f"go {step}")
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=step != 1)
        count = sum(p.numel() for p in model.parameters() if p.requires_grad)
        model.train()
        peer.let_go(f"go {step}")
        job.record("count", count)
        job.record("evaluated", model(job.inputs(100 + step)))
    job.record_state(model, optimizer)


def two_optimizers(job: Job) -> None:
    """The step of one arms its own parameters and no others."""
    model = job.ddp(mlp())
    first, *rest = model.parameters()
    one = job.wrap(torch.optim.SGD([first], lr=0.1), model)
    other = job.wrap(torch.optim.Adam(rest, lr=0.1), model)

    def step_other(_: int) -> None:
        other.step()

    zero_grad = model.zero_grad
    train(job, model, one, steps=FREE_STEPS, after_step=step_other, zero_grad=zero_grad)
    zero_grad()
    backward(job, model, FREE_STEPS)
    one.step()
    with waiting(job, "other", waits=False):
        job.record("other", [p.detach().clone() for p in rest])
    with waiting(job, "one"):
        job.record("one", first.detach().clone())
    other.step()
    job.record_state(model, one, other)


def watched_step(job: Job, kind: str) -> None:
    """Steps that cannot be deferred: step() itself has to wait."""
    model = job.ddp(mlp())
    optimizer: Any = sgd(model)
    if kind == "post_hook":
        optimizer.register_step_post_hook(lambda *_: job.record("hook", weight(model)))
    elif kind == "pre_hook":
        optimizer.register_step_pre_hook(lambda *_: job.record("hook", weight(model).grad))
    elif kind == "unknown":
        optimizer = SignDescent(model.parameters(), lr=0.01)
    job.wrap(optimizer, model, **{"cross_barrier": False} if kind == "backward_only" else {})
    free_steps(job, model, optimizer)
    with waiting(job, "step"):
        backward(job, model, FREE_STEPS)
        optimizer.step()
    job.record_state(model, optimizer)


class Raw(nn.Module):
    """Hands its own parameter, or those of a module that is never called, to a compiled kernel."""

    def __init__(self, holder: nn.Module | None = None) -> None:
        super().__init__()
        self.holder = holder
        self.own = nn.Parameter(torch.randn(8, 8) / 3) if holder is None else None
        self.raw = [(parameter, parameter.data_ptr()) for parameter in self.parameters()]
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        for parameter, address in self.raw:
            x = read_raw(x, parameter, address)
        return self.head(x)


def items() -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(torch.randn(8, 8) / 3) for _ in range(2)])


class RawTied(nn.Module):
    """One weight under two names, read by a kernel in both places."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = RawLinear(8, 8), RawLinear(8, 8)
        self.other.weight = self.one.weight
        self.other.address = self.one.address

    def forward(self, x: Tensor) -> Any:
        return self.other(torch.tanh(self.one(x)))


#: models whose weights are read where no tensor subclass can see it
UNSEEN: dict[str, Callable[[], nn.Module]] = {
    "leaf": lambda: nn.Sequential(RawLinear(8, 8), nn.Linear(8, 4)),
    "root": Raw,
    "child_weight": lambda: Raw(nn.Linear(8, 8, bias=False)),
    "parameter_list": lambda: Raw(items()),
    "tied": RawTied,
    "attention": Attention,
    "encoder_layer": lambda: nn.Sequential(nn.Unflatten(1, (1, 8)), encoder()),
    "compiled": lambda: nn.Sequential(compiled(nn.Linear(8, 8))),
    "compiled_in_place": lambda: compiled_in_place(nn.Sequential(nn.Linear(8, 8), nn.Tanh())),
    "scripted": lambda: nn.Sequential(scripted(nn.Linear(8, 8)), nn.Linear(8, 4)),
    "checkpoint": lambda: Checkpointed(reentrant=False),
}


def scripted(module: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(module)


def compiled(module: nn.Module, **arguments: Any) -> Any:
    return torch.compile(module, backend="eager", **arguments)


def compiled_in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


def unseen_reader(job: Job, name: str) -> None:
    model, optimizer = job.begin(adamw, UNSEEN[name]())
    train(job, model, optimizer, steps=FREE_STEPS + 1)
    model.eval()
    with torch.no_grad(), waiting(job, name):
        job.record("evaluated", model(torch.ones(2, 8)))
    model.train()
    train(job, model, optimizer, steps=2)
    job.record_state(model, optimizer)


def graphs_compiled(job: Job) -> None:
    """Hooks and pending parameters make compiled code neither break nor be compiled again."""
    torch._dynamo.reset()
    counters.clear()
    module = mlp()
    module[2] = compiled(module[2], fullgraph=True)
    model, optimizer = job.begin(adamw, module)
    train(job, model, optimizer)
    job.record("graphs", counters["stats"]["unique_graphs"])
    job.record_state(model, optimizer)
