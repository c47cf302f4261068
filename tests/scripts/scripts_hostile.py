"""Training in which a script does, between backward() and step() and after it, what it should not.

Each act is drawn, from all ranks' numbers or from one rank's own; plain DDP takes all of them.
"""

from __future__ import annotations

import contextlib
import copy
import io
import random
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from training import Job

Act = Callable[[Job, nn.Module, torch.optim.Optimizer, random.Random], object]


class Interrupted(BaseException):
    """As a KeyboardInterrupt that a script catches."""


def _with_gradients(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.grad is not None]


def _gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def _inner(model: nn.Module) -> nn.Module:
    inner = model.module
    assert isinstance(inner, nn.Module)
    return inner


def _clipped(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    job.record("norm", clip_grad_norm_(model.parameters(), draw.choice((0.01, 1.0, 100.0))))


def _clipped_by_value(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    clip_grad_value_(model.parameters(), draw.choice((0.001, 0.1)))


def _clipped_in_parts(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    parameters = _with_gradients(model)
    draw.shuffle(parameters)
    half = len(parameters) // 2
    job.record("half", clip_grad_norm_(parameters[:half], 0.01))
    if draw.random() < 0.5:
        job.record("other half", clip_grad_norm_(parameters[half:], 0.02, foreach=False))


def _clipped_otherwise_on_each_rank(
    job: Job, model: nn.Module, _: object, draw: random.Random
) -> None:
    clip_grad_norm_(model.parameters(), 0.01 * (job.rank + 1))


def _read_one(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    if gradients := _gradients(model):
        job.record("gradient", draw.choice(gradients))


def _read_as_array(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    for gradient in _gradients(model):
        job.record("array", float(gradient.numpy().sum()))


def _flattened(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    if gradients := _gradients(model):
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        job.record("flat", flat.topk(min(3, flat.numel())).values)


def _histogram(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    for gradient in _gradients(model)[:2]:
        job.record("histogram", torch.histc(gradient, 4))


def _normed_at_once(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    if gradients := _gradients(model):
        job.record("norms", torch.stack(torch._foreach_norm(gradients)))
        job.record("total", get_total_norm(gradients))


def _set_to_none(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    draw.choice(list(model.parameters())).grad = None


def _deleted(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    del draw.choice(list(model.parameters())).grad


def _zeroed(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    if gradients := _gradients(model):
        draw.choice(gradients).zero_()


def _scaled(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    by = draw.choice((0.5, 2.0, 3.0))
    for gradient in _gradients(model):
        gradient.mul_(by)


def _scaled_through_data(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    if gradients := _gradients(model):
        draw.choice(gradients).data.div_(3.0)


def _replaced(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    if parameters := _with_gradients(model):
        one = draw.choice(parameters)
        assert one.grad is not None
        one.grad = one.grad.clone().add_(0.01)


def _assigned_to_itself(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    for p in model.parameters():
        p.grad = p.grad


def _exchanged(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    """Gradients of two parameters of one shape."""
    by_shape: dict[torch.Size, nn.Parameter] = {}
    for p in _with_gradients(model):
        other = by_shape.setdefault(p.shape, p)
        if other is not p:
            p.grad, other.grad = other.grad, p.grad
            return


def _noisy(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    generator = torch.Generator().manual_seed(draw.randrange(1 << 20))
    for gradient in _gradients(model):
        gradient.add_(torch.randn(gradient.shape, generator=generator), alpha=0.01)


def _copied(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    copied = copy.deepcopy(_inner(model))
    job.record("copy", copied.state_dict())
    job.record("gradients of the copy", [p.grad for p in copied.parameters()])


def _saved(
    job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, draw: random.Random
) -> None:
    file = io.BytesIO()
    torch.save({"weights": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    job.record("saved", [*loaded["weights"].values()])
    job.record("saved optimizer", loaded["optimizer"])


def _gradients_saved(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    file = io.BytesIO()
    torch.save(_gradients(model), file)
    file.seek(0)
    job.record("saved gradients", torch.load(file, weights_only=True))


def _loaded(
    job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, draw: random.Random
) -> None:
    model.load_state_dict({key: value * 0.5 for key, value in model.state_dict().items()})
    if draw.random() < 0.5:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _evaluated(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    with torch.no_grad():
        job.record("evaluated", model.eval()(job.inputs(77)))
    model.train()


def _flipped(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    """Frozen, with its gradient; plain DDP takes that where it looks for unused parameters."""
    one = draw.choice(list(model.parameters()))
    is_last = all(p is one or not p.requires_grad for p in model.parameters())
    one.requires_grad_(is_last or not model.find_unused_parameters)


def _all_thawed(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    for p in model.parameters():
        p.requires_grad_(True)


def _decayed(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.99)


def _rewritten(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    one = draw.choice(list(model.parameters()))
    one.data = one.data.clone() * 0.9


def _slower(
    job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, draw: random.Random
) -> None:
    optimizer.param_groups[draw.randrange(len(optimizer.param_groups))]["lr"] *= 0.5


def _stepped_again(
    job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, draw: random.Random
) -> None:
    optimizer.step()


def _interrupted(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    raise Interrupted


def _penalised(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    """A second graph over the same weights, with gradients of gradients, that DDP does not see."""
    inner = _inner(model)
    inputs = job.inputs(55).requires_grad_(True)
    (slope,) = torch.autograd.grad(inner(inputs).sum(), inputs, create_graph=True)
    weights = [p for p in inner.parameters() if p.requires_grad]
    if not weights:
        return
    gradients = torch.autograd.grad(slope.square().sum(), weights, allow_unused=True)
    job.record("penalty", [g for g in gradients if g is not None])


#: of one rank alone, too: others do not hear of them
READING = (
    *(_read_one, _read_as_array, _flattened, _histogram, _normed_at_once, _copied),
    *(_gradients_saved, _penalised, _assigned_to_itself),
)
#: of one rank alone, too: ranks drift apart, as they do under plain DDP
CHANGING = (
    *(_clipped, _clipped_by_value, _clipped_in_parts, _clipped_otherwise_on_each_rank),
    *(_set_to_none, _deleted, _zeroed, _scaled, _scaled_through_data, _replaced, _exchanged),
    _noisy,
)
#: of all ranks
TOGETHER = (
    *(_saved, _loaded, _evaluated, _flipped, _all_thawed, _decayed, _rewritten, _slower),
    *(_stepped_again, _interrupted),
)
#: of these, what leaves ranks apart
DIVERGING = (_clipped_otherwise_on_each_rank, _exchanged)
#: after step(), where gradients may be gone
AFTERWARDS = (
    *(_saved, _loaded, _evaluated, _decayed, _rewritten, _slower, _copied, _penalised, _all_thawed),
)


def hostile(job: Job, seed: str, sharded: bool = False) -> None:
    """A few acts in every step, which are drawn from `seed`.

    Args:
        sharded: only those of all ranks, that leave the ranks equal.
    """
    draw, alone = random.Random(seed), random.Random(f"{seed} {job.rank}")
    widths = [draw.choice((8, 16, 16, 40)) for _ in range(draw.randint(1, 4))]
    layers: list[nn.Module] = []
    for before, after in zip([8, *widths], widths, strict=False):
        layers += [nn.Linear(before, after), nn.Tanh()]
    # A layer may be frozen at any time, and get no gradient then.
    model = job.ddp(nn.Sequential(*layers), find_unused_parameters=draw.random() < 0.3)
    late = list(model.parameters())[:2] if draw.random() < 0.3 and len(widths) > 1 else []
    early = [p for p in model.parameters() if all(p is not other for other in late)]
    optimizer: torch.optim.Optimizer = draw.choice(
        (
            lambda: torch.optim.SGD(early, lr=0.05, momentum=0.9),
            lambda: torch.optim.AdamW(early, lr=0.01),
            lambda: torch.optim.Adam(early, lr=0.01, foreach=True),
        )
    )()
    job.wrap(optimizer, model)
    usual = draw.choice((_clipped, _clipped_by_value, _normed_at_once, None))
    changing = [act for act in CHANGING if not sharded or act not in DIVERGING]
    acts = draw.sample(READING, 3), draw.sample(changing, 3), draw.sample(TOGETHER, 2)
    average = copy.deepcopy(model.module).requires_grad_(False)
    for step in range(draw.randint(5, 9)):
        if draw.random() < 0.8:
            optimizer.zero_grad(set_to_none=draw.random() < 0.7)
        elif draw.random() < 0.5:
            model.zero_grad()
        for micro in range(draw.choice((0, 0, 1, 3))):
            with model.no_sync():
                model(job.inputs(1000 + 10 * step + micro)).square().mean().backward()
            if draw.random() < 0.3:
                job.record("inside", clip_grad_norm_(model.parameters(), 0.05))
        with contextlib.suppress(Interrupted):
            if draw.random() < 0.1:
                _fails_forward(job, model, step)
            loss = model(job.inputs(step)).square().mean()
            loss.backward(retain_graph=draw.random() < 0.2)
            job.record("loss", loss)
            chosen = [draw.choice(kind) for kind in acts if draw.random() < 0.4]
            if usual is not None:
                chosen.insert(draw.randrange(len(chosen) + 1), usual)
            for act in chosen:
                act(job, model, optimizer, draw)
            for kind in acts[: 0 if sharded else 2]:
                if alone.random() < 0.15:
                    alone.choice(kind)(job, model, optimizer, alone)
            optimizer.step()
        if late and step == 2:
            optimizer.add_param_group({"params": late, "lr": 0.02})
        if draw.random() < 0.4:
            draw.choice(AFTERWARDS)(job, model, optimizer, draw)
        if draw.random() < 0.5:
            with torch.no_grad():
                for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(p, 0.1)
    job.record("average", average.state_dict())
    job.record_state(model, optimizer)


def _fails_forward(job: Job, model: nn.Module, step: int) -> None:
    """An exception inside the forward pass, which the script catches."""

    def interrupt(module: nn.Module, args: object) -> None:
        raise Interrupted

    last = list(model.modules())[-1]
    handle = last.register_forward_pre_hook(interrupt)
    try:
        with contextlib.suppress(Interrupted):
            model(job.inputs(step))
    finally:
        handle.remove()
