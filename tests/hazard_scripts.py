"""Training scripts in which one rank reads while its peer has not even begun its backward pass.

Whatever the reader sees then must be what plain DDP would have shown: it has to wait, and the peer
goes on once the reader is seen waiting. What says nothing about values must not wait.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import io
import threading
from collections.abc import Callable
from typing import Any

import torch
from rank_worker import signals
from scripts_models import Attention, Checkpointed, RawKernel, RawLinear, encoder
from scripts_optimizers import SignDescent
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from torch.optim.lr_scheduler import StepLR
from torch.utils.checkpoint import checkpoint
from training import Job, adamw, frozen, mlp, sgd, train

import bytesched

#: How long a reader is given to come back before it counts as waiting.
PATIENCE_S = 0.1
#: The first iteration is special, and so may be the one after it.
FREE_STEPS = 3

Look = Callable[[Any, Any], Any]


def weight(model: Any) -> Any:
    """The weight of the layer that the next forward pass needs first."""
    return next(p for p in model.parameters() if p.ndim == 2)


def saved(value: Any) -> Any:
    """What comes out of a file that `value` was saved to."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def without_grad(look: Callable[[Any], Any]) -> Look:
    def call(model: Any, _: Any) -> Any:
        with torch.no_grad():
            return look(model)

    return call


def inference(model: Any, _: Any) -> Any:
    model.eval()
    with torch.inference_mode():
        out = model(torch.ones(2, 8)).clone()
    model.train()
    return out


def written(write: Callable[[Any], object]) -> Look:
    """An in-place edit of the front weight, and what it gave."""

    def call(model: Any, _: Any) -> Any:
        with torch.no_grad():
            write(weight(model))
            return [p.clone() for p in model.parameters()]

    return call


#: After step(): each must wait for what it reads.
WEIGHT_READS: dict[str, Look] = {
    "norm": lambda model, _: weight(model).norm(),
    "data": lambda model, _: weight(model).data.clone(),
    "detach": lambda model, _: weight(model).detach().clone(),
    "numpy": lambda model, _: weight(model).detach().numpy().tolist(),
    "item": lambda model, _: weight(model)[0, 0].item(),
    "printed": lambda model, _: repr(weight(model)),
    "module_printed_values": lambda model, _: str(list(model.parameters())),
    "copied": lambda model, _: copy.deepcopy(weight(model)),
    "model_copied": lambda model, _: list(copy.deepcopy(model.module).parameters()),
    "vector": lambda model, _: nn.utils.parameters_to_vector(model.parameters()),
    "foreach": lambda model, _: torch._foreach_norm(list(model.parameters())),
    "converted": lambda model, _: weight(model).double(),
    "average": lambda model, _: torch.lerp(torch.zeros(16, 8), weight(model).detach(), 0.5),
    "functional": lambda model, _: nn.functional.linear(torch.ones(1, 8), weight(model)),
}
CHECKPOINTS: dict[str, Look] = {
    "state_dict": lambda model, _: frozen(model.state_dict()),
    "state_dict_of_a_part": lambda model, _: frozen(model.module[0].state_dict()),
    "optimizer_state_dict": lambda _, optimizer: frozen(optimizer.state_dict()),
    "optimizer_state": lambda model, optimizer: frozen(optimizer.state[weight(model)]),
    "optimizer_states": lambda _, optimizer: [frozen(s) for s in optimizer.state.values()],
    "saved_state": lambda model, _: saved(model.state_dict()),
    "saved_module": lambda model, _: list(saved(model.module).parameters()),
    "saved_optimizer": lambda _, optimizer: saved(optimizer.state_dict()),
    "copied_state": lambda _, optimizer: copy.deepcopy(optimizer.state_dict()),
    "flushed": lambda *_: bytesched.flush(),
}
EVALUATIONS: dict[str, Look] = {
    "no_grad": without_grad(lambda model: model(torch.ones(2, 8))),
    "inference_mode": inference,
    "module_inside": without_grad(lambda model: model.module(torch.ones(2, 8))),
    "one_layer": without_grad(lambda model: model.module[0](torch.ones(2, 8))),
}
EDITS: dict[str, Look] = {
    "clamp": written(lambda p: p.clamp_(-0.05, 0.05)),
    "clamp_data": written(lambda p: p.data.clamp_(-0.05, 0.05)),
    "copy": written(lambda p: p.copy_(torch.ones(16, 8))),
    "replace_data": written(lambda p: setattr(p, "data", torch.ones(16, 8))),
    "init": written(nn.init.ones_),
    "row": written(lambda p: p.__setitem__(0, 0.0)),
}
#: After step(): says nothing about values, so it must come back at once.
METADATA: dict[str, Look] = {
    "shapes": lambda model, _: [(list(p.shape), p.numel(), p.ndim) for p in model.parameters()],
    "kinds": lambda model, _: [
        (str(p.dtype), str(p.device), p.is_leaf, p.requires_grad) for p in model.parameters()
    ],
    "isinstance": lambda model, _: [isinstance(p, nn.Parameter) for p in model.parameters()],
    "names": lambda model, _: [name for name, _ in model.named_parameters()],
    "identity": lambda model, _: weight(model) in {weight(model): 1},
    "grad_is_none": lambda model, _: [p.grad is None for p in model.parameters()],
    "grad_shapes": lambda model, _: [list(p.grad.shape) for p in model.parameters()],
    "zero_grad_to_none": lambda _, optimizer: optimizer.zero_grad(set_to_none=True),
    "zero_grad_to_zero": lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
    "model_zero_grad": lambda model, _: model.zero_grad(),
    "grad_to_none": lambda model, _: setattr(weight(model), "grad", None),
    "hyper_parameters": lambda _, optimizer: [g["lr"] for g in optimizer.param_groups],
    "lr_written": lambda _, optimizer: optimizer.param_groups[0].update(lr=123.0),
}
#: Between backward() and step().
GRADIENT_READS: dict[str, Look] = {
    "norm": lambda model, _: weight(model).grad.norm(),
    "item": lambda model, _: weight(model).grad[0, 0].item(),
    "data": lambda model, _: weight(model).grad.data.clone(),
    "numpy": lambda model, _: weight(model).grad.numpy().tolist(),
    "copied": lambda model, _: copy.deepcopy(weight(model).grad),
    "finite": lambda model, _: torch.isfinite(weight(model).grad).all(),
    "scaled": lambda model, _: weight(model).grad.mul_(2.0).clone(),
    "listed": lambda model, _: torch.cat([p.grad.flatten() for p in model.parameters()]),
    "replaced": lambda model, _: setattr(weight(model), "grad", weight(model).grad * 2),
}
CLIPPINGS: dict[str, Look] = {
    "norm": lambda model, _: clip_grad_norm_(model.parameters(), 0.01),
    "norm_one_by_one": lambda model, _: clip_grad_norm_(model.parameters(), 0.01, foreach=False),
    "value": lambda model, _: clip_grad_value_(model.parameters(), 0.001),
    "total_norm": lambda model, _: get_total_norm([p.grad for p in model.parameters()]),
}
GRADIENT_METADATA: dict[str, Look] = {
    "is_none": lambda model, _: [p.grad is None for p in model.parameters()],
    "shapes": lambda model, _: [list(p.grad.shape) for p in model.parameters()],
    "kinds": lambda model, _: [(str(p.grad.dtype), p.grad.is_sparse) for p in model.parameters()],
    "parameter": lambda model, _: weight(model).detach().clone(),
}
LOOKS: dict[str, dict[str, Look]] = {
    "weight_reads": WEIGHT_READS,
    "checkpoints": CHECKPOINTS,
    "evaluations": EVALUATIONS,
    "edits": EDITS,
    "metadata": METADATA,
    "gradient_reads": GRADIENT_READS,
    "clippings": CLIPPINGS,
    "gradient_metadata": GRADIENT_METADATA,
}
BEFORE_STEP = {"gradient_reads", "clippings", "gradient_metadata"}


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

    def watch(self, look: Callable[[], Any], figure: str = "waited") -> Any:
        """The value of `look()`; on the reader, let the others go when it is seen waiting.

        Whether it was is kept as a figure of the job. What comes back at once lets nobody go.
        """
        if not self.reads:
            return look()
        back = threading.Event()
        waited: list[bool] = []

        def let_go_if_stuck() -> None:
            waited.append(not back.wait(PATIENCE_S))
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


def one_look(job: Job, kind: str, name: str, reader: int) -> None:
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
    job.record(name, peer.watch(lambda: LOOKS[kind][name](model, optimizer)))
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
    job.record("other", peer.watch(lambda: [p.detach().clone() for p in rest], "waited_other"))
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


class RawRoot(nn.Module):
    """Parameters of its own, beside a child, that only a compiled kernel reads."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.randn(8, 8) / 3)
        self.address = self.own.data_ptr()
        self.child = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return self.child(RawKernel.apply(x, self.own, self.address))


class RawChildWeight(nn.Module):
    """Hands a child's weight to a kernel; the child itself is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(8, 8, bias=False)
        self.address = self.child.weight.data_ptr()
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        return self.head(RawKernel.apply(x, self.child.weight, self.address))


class RawList(nn.Module):
    """Hands the items of a ParameterList to a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.ParameterList([nn.Parameter(torch.randn(8, 8) / 3) for _ in range(2)])
        self.addresses = [item.data_ptr() for item in self.items]

    def forward(self, x: Tensor) -> Any:
        for item, address in zip(self.items, self.addresses, strict=True):
            x = RawKernel.apply(x, item, address)
        return x


class RawTied(nn.Module):
    """One weight under two names, read by a kernel in both places."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = RawLinear(8, 8), RawLinear(8, 8)
        self.other.weight = self.one.weight
        self.other.address = self.one.address

    def forward(self, x: Tensor) -> Any:
        return self.other(torch.tanh(self.one(x)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "leaf": lambda: nn.Sequential(RawLinear(8, 8), nn.Linear(8, 4)),
    "root": RawRoot,
    "child_weight": RawChildWeight,
    "parameter_list": RawList,
    "tied": RawTied,
    "attention": Attention,
    "encoder_layer": lambda: nn.Sequential(nn.Unflatten(1, (1, 8)), encoder()),
    "compiled": lambda: nn.Sequential(torch.compile(nn.Linear(8, 8), backend="eager")),
    "compiled_in_place": lambda: compiled_in_place(nn.Sequential(nn.Linear(8, 8), nn.Tanh())),
    "checkpoint": lambda: Checkpointed(reentrant=False),
}


def compiled_in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


def unseen_reader(job: Job, name: str, reader: int) -> None:
    """A forward pass, with and without gradients, whose reads no tensor subclass can see."""
    peer = Peer(job, reader)
    model = job.ddp(MODELS[name]())
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
    module[2] = torch.compile(module[2], backend="eager", fullgraph=True)
    model = job.ddp(module)
    optimizer = job.wrap(adamw(model), model)
    train(job, model, optimizer)
    job.record("graphs", torch._dynamo.utils.counters["stats"]["unique_graphs"])
    job.record_state(model, optimizer)


class Interrupted(Exception):
    """What the user's code raises."""


def interrupted(job: Job, where: str) -> None:
    """An exception on every rank in the middle of a step, caught; training goes on."""
    model = job.ddp(mlp())
    optimizer = job.wrap(adamw(model), model)
    for step in range(8):
        raising = step in (3, 5)
        handle = None
        try:
            optimizer.zero_grad()
            if raising and where == "forward":
                handle = model.module[2].register_forward_hook(interrupt)
            loss = model(job.inputs(step)).square().mean()
            if raising and where == "before_backward":
                raise Interrupted
            loss.backward()
            if raising and where == "before_step":
                raise Interrupted
            optimizer.step()
            if raising and where == "after_step":
                raise Interrupted
        except Interrupted:
            job.record("interrupted", step)
        if handle:
            handle.remove()
    job.record_state(model, optimizer)


def interrupt(*_: Any) -> None:
    raise Interrupted


class Reused(nn.Module):
    """One layer inside two reentrant checkpoints: its gradient comes in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.layer = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        x = self.head(x)
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


def reused_in_static_graph(job: Job) -> None:
    model = job.ddp(Reused(), static_graph=True)
    optimizer = job.wrap(sgd(model), model)
    train(job, model, optimizer)
    job.record_state(model, optimizer)


def errors_of_reused() -> list[str]:
    """What a plain and a wrapped run say when DDP was not told that the graph is static."""
    kinds = []
    for wrapped in (False, True):
        job = Job(wrapped=wrapped)
        model = job.ddp(Reused())
        optimizer = job.wrap(sgd(model), model)
        try:
            train(job, model, optimizer)
        except (RuntimeError, bytesched.PluginError) as error:
            kinds.append(type(error).__name__)
        with contextlib.suppress(bytesched.BytesschedError):
            job.close()
    return kinds


def error_of_second_backward() -> str:
    """What a wrapped run says to a second backward pass over the same forward pass."""
    job = Job(wrapped=True)
    model = job.ddp(mlp())
    optimizer = job.wrap(sgd(model), model)
    free_steps(job, model, optimizer)
    loss = model(job.inputs(FREE_STEPS)).square().mean()
    loss.backward(retain_graph=True)
    try:
        loss.backward()
    except bytesched.PluginError as error:
        return str(error)
    finally:
        job.close()
    return ""


def ends_with_a_step(wrapped: bool) -> None:
    """A script that ends right after its last step, and prints what its weights are at the end."""
    job = Job(wrapped=wrapped)
    model = job.ddp(mlp())
    memory = [p.detach().numpy() for p in model.parameters()]
    # Registered before the first wrap, so it runs after what bytesched does at exit.
    atexit.register(lambda: print([array.tobytes().hex() for array in memory]))
    optimizer = job.wrap(adamw(model), model)
    train(job, model, optimizer)


def skipped_on_one_rank(timeout_s: float) -> None:
    """A loss that one rank alone finds unfit: it skips backward and step, and goes on."""
    job = Job(wrapped=True, timeout_s=timeout_s)
    model = job.ddp(mlp())
    optimizer = job.wrap(sgd(model), model)
    try:
        for step in range(8):
            optimizer.zero_grad()
            loss = model(job.inputs(step)).square().mean()
            if step == 4 and job.rank == 1:
                continue
            loss.backward()
            optimizer.step()
        bytesched.flush()
    except bytesched.BytesschedError as error:
        print(f"{type(error).__name__}: {error}")
