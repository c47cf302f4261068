"""Training scripts that look at weights and optimizer state, or change them, between steps."""

from __future__ import annotations

import copy
import io
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from training import STEPS, Job, adamw, as_array, gradients, mlp, script, sgd, train


@script(sgd)
def weights_read(job: Job, model: Any, optimizer: Any) -> None:
    ways: list[Any] = [
        repr,
        torch.norm,
        lambda p: p.data,
        lambda p: p.detach(),
        lambda p: p.tolist(),
        lambda p: as_array(p.detach()),
        lambda p: p * 2,
        lambda p: p[0],
        lambda p: p.clone(),
        lambda p: torch.cat([p, p]),
        lambda p: torch.linalg.vector_norm(p),
        lambda p: float(p.flatten()[0]),
        lambda p: torch.equal(p, torch.zeros_like(p)),
        lambda p: p.untyped_storage().nbytes() and bytes(p.untyped_storage()),
        lambda p: p.T,
        lambda p: torch.stack([p, p]).sum(),
        lambda p: nn.utils.parameters_to_vector([p]),
        lambda p: torch._foreach_add([p], 1.0),
        lambda p: copy.copy(p),
        lambda p: copy.deepcopy(p),
        lambda p: p.to(torch.float64),
        lambda p: nn.functional.linear(torch.ones(1, p.shape[-1], device=p.device), p),
        lambda p: format(p.mean()),
        lambda p: torch.ops.aten.sum(p),
        lambda p: torch.linalg.svdvals(p),
        lambda p: torch.einsum("ij,ij->", p, p),
        lambda p: torch.allclose(p, p + 1),
        lambda p: max(row.norm() for row in p),
        lambda p: sum(p.detach().cpu().numpy().ravel().tolist()),
        lambda p: torch.nested.nested_tensor([p, p]).to_padded_tensor(0.0),
        lambda p: torch.quantize_per_tensor(p.detach(), 0.1, 0, torch.qint8).int_repr(),
        lambda p: list(p),
        lambda p: (p == p.max()).sum(),
        lambda p: pickle.loads(pickle.dumps(p)),  # noqa: S301 (its own bytes)
    ]

    def look(step: int) -> None:
        weights = [p for p in model.parameters() if p.ndim == 2]
        for way in ways[step % STEPS :: STEPS]:
            for p in weights:
                job.record("read", way(p))

    train(job, model, optimizer, steps=2 * STEPS, after_step=look)


@script(sgd, when="after_step")
def weights_replaced(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """`p.data` set to another tensor, `nn.init`, and `vector_to_parameters`."""
    if step == 2:
        for p in model.parameters():
            p.data = p.data * 0.5
    elif step == 3:
        nn.init.ones_(model.module[0].weight)
    elif step == 4:
        vector = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(vector / 2, model.parameters())


@script(adamw, wraps=False)
def averaged_model(job: Job, model: Any, optimizer: Any) -> None:
    """By torch's own means, and by hand: one by one, and in lists handed to a foreach kernel."""
    average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    by_hand = copy.deepcopy(model.module)
    means, parameters = list(by_hand.parameters()), list(model.module.parameters())

    @torch.no_grad()
    def update(step: int) -> None:
        average.update_parameters(model.module)
        if step % 2:
            torch._foreach_lerp_(means, parameters, 0.1)
        for mean, p in zip(means, parameters, strict=True) if step % 2 == 0 else ():
            mean.data.mul_(0.9).add_(p.data, alpha=0.1)

    train(job, model, job.wrap(optimizer, model), after_step=update)
    job.record("average", [average.state_dict(), by_hand.state_dict()])


@script(adamw)
def average_compiled(job: Job, model: Any, optimizer: Any) -> None:
    """A compiled function that is given pending parameters, and gradients on the wire."""
    torch._dynamo.reset()
    average = [p.detach().clone() for p in model.parameters()]

    @torch.compile(backend="eager")
    def blend(means: list[Tensor], values: list[Tensor]) -> list[Tensor]:
        return [mean * 0.9 + value * 0.1 for mean, value in zip(means, values, strict=True)]

    @torch.no_grad()
    def update(_: int) -> None:
        average[:] = blend(average, list(model.parameters()))

    def norms(_: int) -> None:
        job.record("doubled", blend(average, gradients(model)))

    train(job, model, optimizer, before_step=norms, after_step=update)
    job.record("average", average)


@script(adamw, when="after_step")
def state_read_after_step(job: Job, model: Any, optimizer: Any, step: int) -> None:
    parameters = list(model.parameters())
    p = parameters[step % len(parameters)]
    job.record("moments", [optimizer.state[p]["exp_avg"], optimizer.state[p]["step"]])
    job.record("sizes", [len(optimizer.state), p in optimizer.state])
    job.record("items", [dict(state) for state in optimizer.state.values()])


@script(sgd, when="after_step")
def state_changed_after_step(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """Momentum restarted by hand."""
    if step == 2:
        optimizer.state.clear()
    elif step == 4:
        for state in optimizer.state.values():
            state["momentum_buffer"].zero_()


#: what is kept of an optimizer, and of its entry for a weight
KEPT: dict[str, Callable[[Any, Any], Any]] = {
    "entry": lambda optimizer, entry: entry,
    "tensor": lambda optimizer, entry: entry["exp_avg"],
    "view": lambda optimizer, entry: entry["exp_avg"][0],
    "packed": lambda optimizer, entry: optimizer.state_dict(),
}


@script(adamw)
def state_kept(job: Job, model: Any, optimizer: Any, what: str) -> None:
    """A part of ``optimizer.state`` is taken out before some steps, and read after each."""
    weight = next(model.parameters())
    kept: list[Any] = []

    def take(step: int) -> None:
        if step == 3:
            kept.append(KEPT[what](optimizer, optimizer.state[weight]))
        if step == 6:
            kept.clear()

    def look(step: int) -> None:
        job.record(f"kept {step}", kept)

    train(job, model, optimizer, steps=10, before_step=take, after_step=look)


@script(adamw, when="after_step")
def state_dicts(job: Job, model: Any, optimizer: Any, step: int) -> None:
    if step % 3 == 0:
        job.record("optimizer", optimizer.state_dict())
    elif step % 3 == 1:
        job.record("part", model.module[2].state_dict())
    job.record("weights", model.state_dict())


@script(sgd, when="after_step")
def saved(job: Job, model: Any, optimizer: Any, step: int) -> None:
    file = io.BytesIO()
    if step % 3 == 0:
        torch.save(model.module, file)
    elif step % 3 == 1:
        torch.save([list(model.parameters()), model.module.state_dict()], file)
    else:
        torch.save(copy.deepcopy(model.module), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    parameters = loaded[0] if isinstance(loaded, list) else list(loaded.parameters())
    job.record("loaded", parameters)
    job.record("types", [type(p).__name__ for p in parameters])
    job.record("copies", [type(p).__name__ for p in copy.deepcopy(model.module).parameters()])


@script(sgd, when="after_step")
def read_by_other_threads(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """A logger's thread reads all weights while the main thread goes on."""
    with ThreadPoolExecutor(2) as readers:
        whole = readers.submit(lambda: [p.detach().clone() for p in model.parameters()])
        norms = readers.submit(lambda: [p.norm() for p in model.parameters()])
        job.record("mine", [p.sum() for p in model.parameters()])
        job.record("theirs", [whole.result(), norms.result()])


def in_child(look: Callable[[], Any]) -> Any:
    """What ``look`` returns in a fork of this process, or a text of what it raises."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, pickle.dumps(look()))
        except BaseException as error:  # noqa: BLE001 - the parent reports it
            os.write(writing, pickle.dumps(repr(error)))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        found = pickle.loads(pipe.read())  # noqa: S301 (its own bytes)
    os.waitpid(child, 0)
    return found


@script(sgd)
def read_by_forked_children(job: Job, model: Any, optimizer: Any) -> None:
    """As workers of a DataLoader do: values, a forward pass, and a step of the child's own."""

    def look(number: int) -> list[float]:
        values = [p.detach().sum() for p in model.parameters()]
        values += [p.grad.sum() for p in model.parameters() if p.grad is not None]
        if number % 2:
            optimizer.step()
        values += [model.module(job.inputs(100)).sum()]
        return [float(value) for value in values]

    def fork(step: int) -> None:
        job.record("child", in_child(lambda: look(step)))

    train(job, model, optimizer, after_step=fork)
    train(job, model, optimizer, steps=3, before_step=fork)


@script(sgd)
def converted_at_the_end(job: Job, model: Any, optimizer: Any) -> None:
    """`model.to(float64)` right after the last step writes through `p.data`."""
    train(job, model, optimizer)
    model.to(torch.float64)


def resumed(job: Job) -> None:
    model, optimizer = job.begin(adamw)
    train(job, model, optimizer, steps=4)
    file = io.BytesIO()
    torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    job.unwrap(optimizer)
    loaded = torch.load(file, weights_only=True)
    module = mlp()
    module.load_state_dict(loaded["model"])
    model = job.ddp(module)
    optimizer = adamw(model)
    optimizer.load_state_dict(loaded["optimizer"])
    job.wrap(optimizer, model)
    train(job, model, optimizer, first_step=4)
    job.record_state(model, optimizer)


@script(adamw)
def rolled_back(job: Job, model: Any, optimizer: Any) -> None:
    """Loaded into the very same objects, with a step still outstanding."""
    train(job, model, optimizer, steps=3)
    kept = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(job, model, optimizer, steps=2, first_step=3)
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    job.record_state(model, optimizer)
    train(job, model, optimizer, first_step=3)
    model.load_state_dict(kept["model"], assign=False)
    train(job, model, optimizer, first_step=9)


@script(sgd, when="after_step", steps=2 * STEPS)
def evaluated(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """Evaluation under `no_grad` and `inference_mode`, with and without `eval()`."""
    if step % 2:
        model.eval()
    with torch.inference_mode() if step % 4 < 2 else torch.no_grad():
        job.record("evaluated", (model if step % 3 else model.module)(job.inputs(step + 100)))
    model.train()


PROGRAMS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "traced": lambda model, x: torch.jit.trace(model, x),
    "exported": lambda model, x: torch.export.export(model, (x,), strict=False).module(),
    "exported strictly": lambda model, x: torch.export.export(model, (x,), strict=True).module(),
}


@script(adamw)
def program_made(job: Job, model: Any, optimizer: Any, how: str) -> None:
    """Of the model after ``step()``, in mid-training."""
    for first_step in (0, 13):
        train(job, model, optimizer, first_step=first_step, steps=13)
        made = PROGRAMS[how](model.module, job.inputs(50))
        job.record("output", made(job.inputs(51)))
