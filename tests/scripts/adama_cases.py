"""AdamA on every rank, beside one process that folds all gradients itself."""

from __future__ import annotations

import copy
import gc
import os
import signal
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from dropped_models import settles
from raised import raised
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bytesched
from bytesched.errors import BytesschedError, TransportError

OPTIMIZERS: dict[str, Any] = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}
STEPS = 4
WIDTH = 40
SETTINGS: dict[str, Any] = {"partition_bytes": 4096, "credit_bytes": 8192, "log_level": "ERROR"}


def model_of(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1)).to(dtype)


def batch(step: int, rank: int, micro: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 50 * rank + micro)
    return torch.randn(6, WIDTH, generator=generator, dtype=torch.float64).to(dtype)


def groups_of(model: nn.Module, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Two, of which the second is slower."""
    *first, last = model.parameters()
    slower = {**options, "lr": options["lr"] / 2}
    return [{"params": first, **options}, {"params": [last], **slower}]


def alone(kind: str, options: dict[str, Any], ranks: int, micro_batches: int) -> nn.Module:
    """AdamA as it is defined: one process, all micro-batches, every gradient folded at once."""
    model = model_of()
    parameters = list(model.parameters())
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]
    largest = [torch.zeros_like(p) for p in parameters]
    b1, b2 = options.get("betas", (0.9, 0.999))
    decay = options.get("weight_decay", 0.01 if kind == "AdamW" else 0.0)
    count = ranks * micro_batches
    for step in range(STEPS):
        for mean, square in moments:
            mean.mul_(b1)
            square.mul_(b2)
        for rank, micro in product(range(ranks), range(micro_batches)):
            loss = model(batch(step, rank, micro)).square().mean() / count
            gradients = torch.autograd.grad(loss, parameters)
            for p, gradient, (mean, square) in zip(parameters, gradients, moments, strict=True):
                g = -gradient if options.get("maximize") else gradient
                if kind == "Adam":
                    g = g + decay / count * p.detach()
                mean.add_((1 - b1) * g)
                square.add_((1 - b2) * g * g)
        with torch.no_grad():
            for n, (p, (mean, square)) in enumerate(zip(parameters, moments, strict=True)):
                lr = options["lr"] / (1 if n < len(parameters) - 1 else 2)
                if kind == "AdamW":
                    p.mul_(1 - lr * decay)
                torch.maximum(largest[n], square, out=largest[n])
                v = largest[n] if options.get("amsgrad") else square
                spread = (v / (1 - b2 ** (step + 1))).sqrt() + 1e-8
                p.sub_(lr * mean / (1 - b1 ** (step + 1)) / spread)
    return model


def train(
    call: nn.Module, optimizer: torch.optim.Optimizer, steps: range, micro_batches: int, how: str
) -> None:
    """As a script accumulates: under no_sync() or not, by a closure or not."""
    rank = dist.get_rank()

    def mini_batch(step: int) -> float:
        for micro in range(micro_batches):
            is_local = "no_sync" in how and micro < micro_batches - 1
            first = next(call.parameters())
            with call.no_sync() if is_local else nullcontext():  # type: ignore[operator]
                loss = call(batch(step, rank, micro, first.dtype).to(first.device)).square().mean()
                (loss / micro_batches).backward()
        return 0.0

    for step in steps:
        if "closure" in how:
            optimizer.step(lambda: mini_batch(step))  # noqa: B023 - called at once
        else:
            mini_batch(step)
            optimizer.step()
        optimizer.zero_grad(set_to_none="zeros" not in how)


def wrap(optimizer: torch.optim.Optimizer, model: nn.Module, **settings: Any) -> None:
    own = {"accumulate": "adama", "micro_batches": 2}
    bytesched.wrap(optimizer, model, **SETTINGS | own | settings)


def begun(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[nn.Module, Any]:
    model = model_of(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), **{"lr": 1e-3} | options)
    wrap(optimizer, model)
    return model, optimizer


def equals_alone(
    kind: str,
    options: dict[str, Any],
    micro_batches: int,
    how: str,
    settings: dict[str, Any],
    device: str = "cpu",
) -> float:
    """The largest difference from one process, relative to the largest parameter of its tensor.

    That process computes on the CPU.
    """
    options = {"lr": 1e-2, **options}
    model = model_of().to(device)
    call = DistributedDataParallel(model) if "ddp" in how else model
    optimizer = OPTIMIZERS[kind](groups_of(model, options))
    wrap(optimizer, call, micro_batches=micro_batches, **settings)
    train(call, optimizer, range(STEPS), micro_batches, how)
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    bytesched.unwrap(optimizer)
    reference = alone(kind, options, dist.get_world_size(), micro_batches)
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    with torch.no_grad():
        return max(float((p.cpu() - q).abs().max() / q.abs().max()) for p, q in pairs)


def goes_on_from_a_checkpoint() -> tuple[bool, bool, list[str]]:
    """Whether parameters and moments have the bits of training that was never interrupted."""
    options = {"lr": 1e-2, "amsgrad": True}
    whole, uninterrupted = begun(torch.float64, **options)
    train(whole, uninterrupted, range(4), 2, "")
    model, optimizer = begun(torch.float64, **options)
    train(model, optimizer, range(2), 2, "")
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, range(2, 3), 2, "")
    bytesched.unwrap(optimizer)
    other, loaded = begun(torch.float64, **options)
    # Into one that has trained as well: its moments lie in memory of ours.
    train(other, loaded, range(7, 9), 2, "")
    other.load_state_dict(saved[0])
    loaded.load_state_dict(saved[1])
    train(other, loaded, range(2, 4), 2, "")
    one, two = uninterrupted.state_dict()["state"], loaded.state_dict()["state"]
    same_state = all(torch.equal(one[n][k], two[n][k]) for n in one for k in one[n])
    same = all(map(torch.equal, whole.parameters(), other.parameters()))
    for each in (uninterrupted, loaded):
        bytesched.unwrap(each)
    return same, same_state, list(one[0])


def most_elements() -> None:
    """Prints elements: the most alive after a gradient, of the model, and of its largest layer.

    For a process of its own: no tensor of anything else may come or go.
    """
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    gc.collect()
    before = _alive()
    wrap(optimizer, model, micro_batches=3)
    found = []
    for parameter in model.parameters():
        # Before ours: a gradient is here, and its layer's inputs and outputs are of two rows.
        parameter.register_post_accumulate_grad_hook(lambda _: found.append(_alive()))
        parameter._post_accumulate_grad_hooks.move_to_end(  # type: ignore[attr-defined]
            next(reversed(parameter._post_accumulate_grad_hooks)), last=False
        )
    for _ in range(3):
        for micro in range(3):
            (model(torch.randn(2, 64)).square().mean() / (micro + 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    bytesched.unwrap(optimizer)
    elements = sum(p.numel() for p in model.parameters())
    print(max(found) - before, elements, 64 * 64)
    dist.destroy_process_group()


def _alive() -> int:
    storages: dict[int, int] = {}
    for found in gc.get_objects():
        if issubclass(type(found), torch.Tensor) and found.device.type == "cpu":
            with torch._C.DisableTorchFunctionSubclass():
                storage = found.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values()) // 4


def is_let_go_of() -> bool:
    model, optimizer = begun()
    train(model, optimizer, range(2), 2, "")
    weak_model, weak_optimizer = weakref.ref(model), weakref.ref(optimizer)
    del model, optimizer
    # An update that is outstanding keeps its optimizer.
    return settles(lambda: weak_model() is None and weak_optimizer() is None)


#: of uses that it is not there for
REFUSED_SETTINGS: dict[str, dict[str, Any]] = {
    "shard": {"shard": True},
    "split": {"split": "on"},
    "compression": {"compression": "bf16"},
    "unused": {"find_unused_parameters": True},
    "micro_batches": {"micro_batches": 0},
    "accumulate": {"accumulate": "adamb"},
    "micro_batches alone": {"accumulate": None},
}


def refused(case: str) -> str:
    model = model_of(torch.float32)
    parameters = list(model.parameters())[case == "left out" :]
    optimizer = (torch.optim.SGD if case == "SGD" else torch.optim.AdamW)(parameters, lr=0.1)

    def use() -> None:
        wrap(optimizer, model, **REFUSED_SETTINGS.get(case, {}))
        try:
            _USES[case](model, optimizer)
        finally:
            # The first error of a session is final, and raised again.
            with suppress(BytesschedError):
                bytesched.unwrap(optimizer)

    return raised(use) or "nothing"


def _passes(model: nn.Module, count: int) -> None:
    for micro in range(count):
        (model(batch(0, dist.get_rank(), micro, torch.float32)).square().mean() / 2).backward()


def _clips(model: nn.Module, *, beside: bool = False) -> None:
    _passes(model, 2)
    if beside:
        nn.Linear(2, 2)(torch.ones(2)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def _reads(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    train(model, optimizer, range(1), 2, "")
    _passes(model, 2)
    first = next(model.parameters())
    assert first.grad is not None
    first.grad.mul_(2)


def _scales(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(2):
        output = model(batch(0, dist.get_rank(), 0, torch.float32))
        scaler.scale(output.square().mean() / 2).backward()
    scaler.step(optimizer)


def _steps_early(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    train(model, optimizer, range(1), 2, "")
    _passes(model, 1)
    optimizer.step()


def _calls_ahead(model: nn.Module, optimizer: torch.optim.Optimizer, before: int = 0) -> None:
    train(model, optimizer, range(before), 2, "")
    # Nothing has come since the last step: it does nothing, as without gradients.
    optimizer.step()
    first, second = (
        model(batch(0, dist.get_rank(), micro, torch.float32)).square().mean() for micro in range(2)
    )
    first.backward()
    second.backward()
    optimizer.step()


def _saves_within(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    _passes(model, 1)
    optimizer.state_dict()


_USES: dict[str, Callable[[nn.Module, torch.optim.Optimizer], object]] = {
    "clip": lambda model, _: _clips(model),
    "clip after another pass": lambda model, _: _clips(model, beside=True),
    "read": _reads,
    "scaler": _scales,
    "early": _steps_early,
    "late": lambda model, _: _passes(model, 3),
    "ahead": _calls_ahead,
    "ahead later": partial(_calls_ahead, before=2),
    "save": _saves_within,
    "another": lambda model, _: bytesched.wrap(torch.optim.AdamW(model.parameters()), model),
}


def dies_in_a_mini_batch() -> None:
    model, optimizer = begun()
    train(model, optimizer, range(2), 2, "")
    _passes(model, 1)
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)

    def go_on() -> None:
        _passes(model, 1)
        optimizer.step()
        bytesched.flush(optimizer)

    print(raised(go_on, TransportError), flush=True)
    os._exit(0)
