"""Training scripts about models: how parameters are held, shared, used and left unused."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from training import STEPS, Job, adamw, backward, gradients, mlp, script, sgd, train


class TiedText(nn.Module):
    """An embedding whose weight, or its memory, is also the output projection's."""

    def __init__(self, *, by_data: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 12, bias=False)
        if by_data:
            self.head.weight.data = self.embed.weight.data
        else:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Any:
        return self.head(torch.tanh(self.body(self.embed(tokens))))


class Attention(nn.Module):
    """`MultiheadAttention` never calls the module that holds its output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        x = x.unflatten(1, (1, 8)) if x.ndim == 2 else x
        return self.head(self.attend(x, x, x)[0])


class Borrower(nn.Module):
    """A root with parameters of its own that also uses a child's weight without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.child = nn.Linear(8, 8, bias=False)
        self.called = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return self.called(nn.functional.linear(x * self.scale, self.child.weight))


class Lists(nn.Module):
    """Parameters in containers that are never called."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.ParameterList([nn.Parameter(torch.randn(8, 8) / 3) for _ in range(3)])
        self.named = nn.ParameterDict({"bias": nn.Parameter(torch.zeros(8))})

    def forward(self, x: Tensor) -> Any:
        for item in self.items:
            x = torch.tanh(x @ item)
        return x + self.named["bias"]


class Branching(nn.Module):
    """Uses one of two branches, and nothing at all of a third."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.left, self.right, self.never = (nn.Linear(8, 8) for _ in range(3))
        self.turn = "left"

    def forward(self, x: Tensor) -> Any:
        x = torch.relu(self.stem(x))
        if self.turn == "both":
            return self.left(x) + self.right(x)
        return self.left(x) if self.turn == "left" else self.right(x)


class RawKernel(torch.autograd.Function):
    """Reads the weight through its address, as a compiled kernel does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, address: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.address = address
        return x @ memory(address, weight.shape).T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return grad @ memory(ctx.address, weight.shape), grad.T @ x, None


def read_raw(x: Tensor, weight: Tensor, address: int) -> Any:
    return RawKernel.apply(x, weight, address)  # type: ignore[no-untyped-call]


def memory(address: int, shape: torch.Size) -> Tensor:
    """A copy of the floats at `address`."""
    raw = (ctypes.c_float * shape.numel()).from_address(address)
    return torch.frombuffer(raw, dtype=torch.float32).reshape(shape).clone()


class RawLinear(nn.Linear):
    """A layer whose forward hands the weight's address, taken once, to a compiled kernel."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.address = self.weight.data_ptr()

    def forward(self, x: Tensor) -> Any:
        return read_raw(x, self.weight, self.address)


class Checkpointed(nn.Module):
    """Recomputes its middle in backward."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.head, self.tail = nn.Linear(8, 8), nn.Linear(8, 4)
        self.middle = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Any:
        x = checkpoint(self.middle, self.head(x), use_reentrant=self.reentrant)
        return self.tail(x)


class Mixed(nn.Module):
    """Layers of several precisions, a scalar, an empty and a transposed parameter."""

    def __init__(self, short: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8).double()
        self.third = nn.Linear(8, 8).to(short)
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0))
        self.transposed = nn.Parameter(torch.randn(8, 6).T)

    def forward(self, x: Tensor) -> Any:
        x = self.second(self.first(x).double()) * self.scalar
        x = self.third(x.to(self.third.weight.dtype)).float()
        return x @ self.transposed.T + self.empty.sum()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, num_layers=2)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.lstm(x)[0])


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


def normalised() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4)
    )


def convolution() -> nn.Module:
    """Channels last, so that gradients have strides of their own."""
    body = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(16, 4)
    )
    for p in body.parameters():
        if p.ndim == 4:
            p.data = p.data.contiguous(memory_format=torch.channels_last)
    return body


def parametrized() -> nn.Module:
    """Weights computed from others at each use."""
    return nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(8, 16)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(16, 4)),
    )


def raw_kernel() -> nn.Module:
    return nn.Sequential(
        RawLinear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), RawLinear(16, 4)
    )


def frozen_mlp() -> nn.Sequential:
    module = mlp()
    module[0].requires_grad_(False)
    return module


def scripted(how: str) -> nn.Module:
    """One with a block that the TorchScript interpreter runs, which has references to weights."""
    module = mlp()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if how == "script":
            module[0] = torch.jit.script(module[0])
        else:
            module[0] = torch.jit.trace(module[0], torch.ones(4, 8))
    return module


#: what a parameter is in, how it is shared, read and updated, by name
MODELS: dict[str, Any] = {
    "attention": Attention,
    "borrowed_weight": Borrower,
    "parameter_list": Lists,
    "encoder_layer": encoder,
    "lstm": Recurrent,
    "batch_norm": normalised,
    "convolution": convolution,
    "parametrized": parametrized,
    "mixed_dtypes": Mixed,
    "raw_kernel": raw_kernel,
    "checkpoint": lambda: Checkpointed(reentrant=False),
    "checkpoint_reentrant": lambda: Checkpointed(reentrant=True),
    "tied": TiedText,
    "tied_by_data": lambda: TiedText(by_data=True),
    "linear": lambda: nn.Linear(8, 4),
    "frozen": frozen_mlp,
    "scripted": lambda: scripted("script"),
    "traced": lambda: scripted("trace"),
}
SHAPES = {"convolution": (3, 2, 4, 4), "encoder_layer": (2, 3, 8), "lstm": (3, 2, 8)}


def batch(job: Job, name: str, step: int) -> Tensor:
    """The input of the model `name` at `step`."""
    if name.startswith("tied"):
        return job.inputs(step, 4, 6).mul(100).long().remainder(12)
    x = job.inputs(step, *SHAPES.get(name, (4, 8)))
    return x.contiguous(memory_format=torch.channels_last) if name == "convolution" else x


def one_model(job: Job, name: str, arguments: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Training, and an evaluation after every step; the arguments are DDP's."""
    model, optimizer = job.begin(adamw, MODELS[name](), **arguments)

    def evaluate(step: int) -> None:
        if step < 2:
            return
        model.eval()
        called = model if step % 3 else getattr(model, "module", model)
        with torch.inference_mode() if step % 2 else torch.no_grad():
            job.record("evaluated", called(batch(job, name, 100 + step)))
        model.train()

    train(job, model, optimizer, inputs=lambda step: batch(job, name, step), after_step=evaluate)
    job.record_state(model, optimizer)


@script(adamw, module=Branching, find_unused_parameters=True)
def unused(job: Job, model: Any, optimizer: Any, turns: str) -> None:
    """Parameters left out on some ranks in some steps; one layer is never used."""
    plans = {
        "same_on_all_ranks": ["left", "right", "both"],
        "differing_ranks": ["left", "right", "both"] if job.rank else ["right", "right", "left"],
    }
    for step in range(3 * STEPS):
        model.module.turn = plans[turns][step % 3]
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss = backward(job, model, step)
        job.record("gradients", gradients(model))
        optimizer.step()
        job.record("loss", loss)


@script(sgd, module=Branching, when="step", steps=3 * STEPS, find_unused_parameters=True)
def unused_with_gradients_left(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """What no rank used keeps the gradient that each rank has made of it, and is updated by it."""
    inner = getattr(model, "module", model)
    if step % 3 == 0:
        optimizer.zero_grad()
    inner.turn = "left" if step % 3 else "both"
    backward(job, model, step)
    if step % 3 == 0:
        torch._foreach_mul_(gradients(inner.right), job.rank + 1)
    if step % 3 == 2:
        # Not before: what is read has memory of its own from then on.
        job.record("gradients", gradients(model))
    optimizer.step()


@script(adamw, module=Branching, static_graph=True)
def unused_static(job: Job, model: Any, optimizer: Any, to_none: bool = True) -> None:
    train(job, model, optimizer, zero_grad=partial(optimizer.zero_grad, set_to_none=to_none))
    job.record("gradients", gradients(model))


@script(adamw, when="after_step", steps=2 * STEPS, find_unused_parameters=True)
def frozen_for_a_while(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """Layers that DDP averages are frozen and thawed by turns."""
    for number, layer in enumerate(model.module):
        layer.requires_grad_(number % 4 != 2 * (step % 2))


def reusing() -> nn.Module:
    shared = nn.Linear(8, 8)
    return nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh(), shared, nn.Linear(8, 4))


@script(sgd, reusing)
def reused_layer(job: Job, model: Any, optimizer: Any) -> None:
    train(job, model, optimizer)


@script(
    partial(sgd, momentum=0.0),
    lambda: nn.Sequential(nn.Embedding(12, 8, sparse=True), nn.Linear(8, 4)),
)
def sparse_gradients(job: Job, model: Any, optimizer: Any) -> None:
    """Rows that differ from rank to rank."""
    train(job, model, optimizer, inputs=lambda step: batch(job, "tied", step))


@script(adamw, when="loss")
def regularised(job: Job, model: Any, optimizer: Any, step: int) -> Any:
    penalty = sum(p.square().sum() for p in model.parameters())
    return model(job.inputs(step)).square().mean() + 0.01 * penalty


@script(adamw, when="loss")
def partly_around_ddp(job: Job, model: Any, optimizer: Any, step: int) -> Any:
    loss = model(job.inputs(step)).square().mean()
    return loss + model.module[0](job.inputs(step + 50)).abs().mean()


@script(adamw)
def evaluated_first(job: Job, model: Any, optimizer: Any) -> None:
    """Forward passes without a backward before the first step, with and without gradients."""
    model.eval()
    with torch.no_grad():
        job.record("evaluated", model(job.inputs(0)))
    job.record("evaluated", model.module[:2](job.inputs(0)))
    model.train()
    job.record("evaluated", model(job.inputs(1)))
    train(job, model, optimizer)


@script(adamw)
def work_on_one_rank(job: Job, model: Any, optimizer: Any, asks: bool = True) -> None:
    """The first rank alone evaluates, logs and saves between steps, and another asks for norms."""

    def look(step: int) -> None:
        if job.rank == 0 and step % 2 == 0:
            with torch.no_grad():
                job.record("evaluated", model.module(job.inputs(100 + step)))
            job.record("weights", model.module.state_dict())
            job.record("optimizer", optimizer.state_dict())
            job.record("norms", [p.norm() for p in model.parameters()])

    def log(step: int) -> None:
        if asks and job.rank == 1 and step % 2:
            job.record("norms", [p.grad.norm() for p in model.parameters()])

    train(job, model, optimizer, before_step=log, after_step=look)


def ignored() -> nn.Module:
    module = mlp()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["2.weight"])
    return module


@script(sgd, ignored)
def ignored_by_ddp(job: Job, model: Any, optimizer: Any) -> None:
    """Parameters that DDP was told to leave alone stay local."""
    train(job, model, optimizer)


class Method(nn.Module):
    """Its users call a method of it, or its parts, and never the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Any:
        return self.predict(x)

    def predict(self, x: Tensor) -> Any:
        return self.head(torch.tanh(self.body(x)))


def drawn() -> nn.Module:
    torch.manual_seed(dist.get_rank())
    module = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    module.register_buffer("drawn", torch.randn(3))
    return module


@script(adamw, drawn)
def different_starts(job: Job, model: Any, optimizer: Any) -> None:
    train(job, model, optimizer)


@script(adamw, module=Method)
def called_by_method(job: Job, model: Any, optimizer: Any) -> None:
    """A module without DDP whose own call never happens."""
    train(job, model.predict if job.wrapped else model, optimizer)


@script(adamw, when="loss")
def autocast(job: Job, model: Any, optimizer: Any, step: int) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(job.inputs(step)).float().square().mean()


def compiled(job: Job, what: str, backend: str) -> None:
    """`torch.compile` of a part of the module, of all of it, or of DDP, before `wrap` or after.

    "whole before": DDP is compiled, and it is DDP that is wrapped.
    """
    torch._dynamo.reset()
    counters.clear()
    module: Any = mlp()
    if what == "block":
        module[0] = torch.compile(module[0], backend=backend)
    elif what == "inner":
        module = torch.compile(module, backend=backend)
    elif what == "in_place":
        module.compile(backend=backend)
    model = called = job.ddp(module)
    if what in ("whole", "whole before"):
        called = torch.compile(model, backend=backend)
    if what == "whole":
        model = called
    optimizer = job.wrap(adamw(model), model)
    if what == "whole after":
        called = torch.compile(model, backend=backend)
    elif what == "in_place after":
        module.compile(backend=backend)
    train(job, called, optimizer)
    if what in ("whole before", "whole after"):
        job.record("is compiled", counters["stats"]["unique_graphs"] > 0)
    job.record_state(model, optimizer)
