"""Training scripts in which one rank reads while its peer has not even begun its backward pass.

Whatever the reader sees then must be what plain DDP would have shown: it has to wait, and the peer
goes on once the reader is seen waiting. What says nothing about values must not wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import unseen_models
from looks import BEFORE_STEP, LOOKS, weight
from rank_worker import signals
from scripts_optimizers import SignDescent
from torch import Tensor
from torch.optim.lr_scheduler import StepLR
from training import Job, adamw, mlp, sgd, train

#: How long a reader is given to come back before it counts as waiting: if it should wait, and if
#: it should not, on a machine that may be busy with other things.
SHORT_S, LONG_S = 0.1, 3.0
#: The first iteration is special, and so may be the one after it.
FREE_STEPS = 3


class Peer:
    """Holds back the ranks that do not read, from before their backward until they are let go."""

    def __init__(self, job: Job, reader: int) -> None:
        self._job = job
        self.reads = job.wrapped and job.rank == reader
        self._held = job.wrapped and job.rank != reader

    def hold(self, name: str = "go") -> None:
        """On a rank that does not read: wait to be let go."""
        if self._held:
            signals().wait(name)

    def let_go(self, name: str = "go") -> None:
        if self.reads:
            signals().set(name)

    def watch(
        self, look: Callable[[], Any], figure: str = "waited", *, patience_s: float = SHORT_S
    ) -> Any:
        """The value of `look()`; on the reader, let the others go when it is seen waiting.

        Whether it was is kept as a figure of the job. What comes back at once lets nobody go.
        """
        if not self.reads:
            return look()
        back = threading.Event()
        waited: list[bool] = []

        def let_go_if_stuck() -> None:
            waited.append(not back.wait(patience_s))
            if waited[0]:
                self.let_go()

        watcher = threading.Thread(target=let_go_if_stuck)
        watcher.start()
        try:
            value = look()
        finally:
            back.set()
            watcher.join()
        self._job.stats[figure] = int(waited[0])
        return value


def one_look(job: Job, kind: str, name: str, reader: int, patience_s: float) -> None:
    """One look by the rank `reader` while nothing of its step can have arrived."""
    peer = Peer(job, reader)
    model = job.ddp(mlp())
    optimizer = job.wrap(adamw(model), model)
    train(job, model, optimizer, steps=FREE_STEPS)
    optimizer.zero_grad()
    loss = model(job.inputs(FREE_STEPS)).square().mean()
    peer.hold()
    loss.backward()
    if kind not in BEFORE_STEP:
        optimizer.step()
    job.record(name, peer.watch(lambda: LOOKS[kind][name](model, optimizer), patience_s=patience_s))
    if kind in BEFORE_STEP:
        optimizer.step()
    peer.let_go()
    train(job, model, optimizer, steps=2, first_step=FREE_STEPS + 1)
    job.record_state(model, optimizer)


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
    model = job.ddp(mlp())
    optimizer = job.wrap(adamw(model), model)
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


def schedule(job: Job, reader: int, lr: str) -> None:
    """Hyper-parameters move between step() and the update, in place and by replacement."""
    peer = Peer(job, reader)
    model = job.ddp(mlp())
    optimizer = sgd(model, lr=torch.tensor(0.1) if lr == "tensor" else 0.1)
    scheduler = StepLR(optimizer, 1, gamma=0.1)
    job.wrap(optimizer, model)
    free_steps(job, model, optimizer)
    held_backward(job, peer, model)
    optimizer.step()
    scheduler.step()
    optimizer.param_groups[0]["momentum"] = 0.1
    optimizer.zero_grad()
    peer.let_go()
    train(job, model, optimizer, steps=2)
    job.record_state(model, optimizer)


def grad_scaler(job: Job, reader: int, fused: bool) -> None:
    """The peer's gradients overflow: the reader must not step either."""
    peer = Peer(job, reader)
    model = job.ddp(mlp())
    optimizer = job.wrap(adamw(model, fused=fused), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(FREE_STEPS + 2):
        optimizer.zero_grad()
        loss = model(job.inputs(step)).square().mean()
        held = step == FREE_STEPS
        if held:
            peer.hold()
            loss = loss * (float("inf") if job.rank != reader else 1.0)
        scaler.scale(loss).backward()
        if held:
            peer.watch(lambda: scaler.step(optimizer))
        else:
            scaler.step(optimizer)
        scaler.update()
        job.record("scale", scaler.get_scale())
    job.record_state(model, optimizer)


def two_optimizers(job: Job, reader: int) -> None:
    """The step of one arms its own parameters and no others."""
    peer = Peer(job, reader)
    model = job.ddp(mlp())
    first, *rest = model.parameters()
    one = job.wrap(torch.optim.SGD([first], lr=0.1), model)
    other = job.wrap(torch.optim.Adam(rest, lr=0.1), model)
    for step in range(FREE_STEPS):
        model(job.inputs(step)).square().mean().backward()
        one.step()
        other.step()
        model.zero_grad()
    held_backward(job, peer, model)
    one.step()
    others = peer.watch(
        lambda: [p.detach().clone() for p in rest], "waited_other", patience_s=LONG_S
    )
    job.record("other", others)
    job.record("one", peer.watch(lambda: first.detach().clone()))
    other.step()
    job.record_state(model, one, other)


def watched_step(job: Job, reader: int, kind: str) -> None:
    """Steps that cannot be deferred: step() itself has to wait."""
    peer = Peer(job, reader)
    model = job.ddp(mlp())
    optimizer: Any = sgd(model)
    fields: dict[str, Any] = {}
    if kind == "post_hook":
        optimizer.register_step_post_hook(lambda *_: job.record("hook", weight(model)))
    elif kind == "pre_hook":
        optimizer.register_step_pre_hook(lambda *_: job.record("hook", weight(model).grad))
    elif kind == "unknown":
        optimizer = SignDescent(model.parameters(), lr=0.01)
    elif kind == "backward_only":
        fields["cross_barrier"] = False
    job.wrap(optimizer, model, **fields)
    free_steps(job, model, optimizer)
    held_backward(job, peer, model)
    peer.watch(optimizer.step)
    job.record_state(model, optimizer)


def accumulated(job: Job, reader: int) -> None:
    """Local passes, then a synchronised one that is held; attribute set, as nanoGPT does."""
    peer = Peer(job, reader)
    model = job.ddp(mlp())
    optimizer = job.wrap(sgd(model), model)
    free_steps(job, model, optimizer)
    for micro in range(3):
        model.require_backward_grad_sync = micro == 2
        loss = model(job.inputs(50 + micro)).square().mean()
        if micro == 2:
            peer.hold()
        loss.backward()
        if micro < 2:
            job.record("local", [p.grad for p in model.parameters()])
    job.record("averaged", peer.watch(lambda: [p.grad.clone() for p in model.parameters()]))
    optimizer.step()
    train(job, model, optimizer, steps=2)
    job.record_state(model, optimizer)


def unseen_reader(job: Job, name: str, reader: int) -> None:
    """A forward pass, with and without gradients, whose reads no tensor subclass can see."""
    peer = Peer(job, reader)
    model = job.ddp(unseen_models.MODELS[name]())
    optimizer = job.wrap(adamw(model), model)
    free_steps(job, model, optimizer)
    held_backward(job, peer, model)
    optimizer.step()
    model.eval()
    with torch.no_grad():
        job.record("evaluated", peer.watch(lambda: model(torch.ones(2, 8))))
    model.train()
    train(job, model, optimizer, steps=2)
    job.record_state(model, optimizer)


def graphs_compiled(job: Job) -> None:
    """Hooks and pending parameters make compiled code neither break nor be compiled again."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    module = mlp()
    module[2] = unseen_models.compiled(module[2], fullgraph=True)
    model = job.ddp(module)
    optimizer = job.wrap(adamw(model), model)
    train(job, model, optimizer)
    job.record("graphs", torch._dynamo.utils.counters["stats"]["unique_graphs"])
    job.record_state(model, optimizer)
