"""Looks at a model and its optimizer: some say something about values, and some do not."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils import dlpack
from training import frozen

import bytesched

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


def flushed(value: Any) -> Any:
    """The same, once everything outstanding has been applied."""
    bytesched.flush()
    return value


def copied(value: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.tensor(value)


def nested(tensors: list[Any]) -> Any:
    return torch.nested.nested_tensor(tensors).to_padded_tensor(0.0)


def scripted_sum() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(total)


def total(x: torch.Tensor) -> torch.Tensor:
    return x.sum()


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


def sent(value: Any) -> Any:
    """What arrives where it is sent to, in a process."""
    return pickle.loads(ForkingPickler.dumps(value)).clone()  # noqa: S301 (its own bytes)


any_torch: Any = torch

#: In C++, with no look at the class of what they are given.
UNASKED: dict[str, Callable[[Any], Any]] = {
    "to_dlpack": lambda t: dlpack.from_dlpack(any_torch.to_dlpack(t)).clone(),
    "new": lambda t: torch.ones(1).new(t).clone(),
    "new_tensor": lambda t: torch.ones(1).new_tensor(t),
    "as_subclass": lambda t: t.as_subclass(torch.Tensor).detach().clone(),
    "make_subclass": lambda t: torch.Tensor._make_subclass(torch.Tensor, t).clone(),
    "nested": lambda t: nested([t, t]),
    "nested_as": lambda t: torch.nested.as_nested_tensor([t, t]).to_padded_tensor(0.0),
    "scripted": lambda t: scripted_sum()(t),
    "vmap": lambda t: torch.vmap(torch.sum)(t),
    "func_grad": lambda t: any_torch.func.grad(torch.norm)(t),
    "func_vjp": lambda t: torch.func.vjp(torch.sin, t)[0].detach().clone(),
    "func_jvp": lambda t: torch.func.jvp(torch.sin, (t,), (t,))[1].detach().clone(),
    "func_jacrev": lambda t: torch.func.jacrev(torch.sum)(t),
    "backward_of_it": lambda t: torch.autograd.grad(
        (x := torch.ones(16, 8, requires_grad=True)) * 2, x, t
    ),
    "parameter": lambda t: nn.Parameter(t, requires_grad=False).clone(),
    "buffer": lambda t: nn.Buffer(t.detach()).clone(),
    "embedding": lambda t: nn.Embedding.from_pretrained(t)(torch.tensor([0, 3])),
    "sent": lambda t: sent(t.detach()),
    "sent_itself": lambda t: sent(t).detach(),
}


def unasked(of: Callable[[Any], Any]) -> dict[str, Look]:
    """Those readers, given what ``of`` takes out of the model."""
    return {
        name: lambda model, _, read=read: read(of(model))  # type: ignore[misc]
        for name, read in UNASKED.items()
    }


#: After step(): each must wait for what it reads.
WEIGHT_READS: dict[str, Look] = {
    "norm": lambda model, _: weight(model).norm(),
    "data": lambda model, _: weight(model).data.clone(),
    "detach": lambda model, _: weight(model).detach().clone(),
    "numpy": lambda model, _: weight(model).detach().numpy().tolist(),
    "item": lambda model, _: weight(model)[0, 0].item(),
    "array": lambda model, _: numpy.asarray(weight(model).detach()).tolist(),
    "storage": lambda model, _: list(weight(model).untyped_storage()),
    "printed": lambda model, _: repr(weight(model)),
    "module_printed_values": lambda model, _: str(list(model.parameters())),
    "copied": lambda model, _: copy.deepcopy(weight(model)),
    "model_copied": lambda model, _: list(copy.deepcopy(model.module).parameters()),
    "vector": lambda model, _: nn.utils.parameters_to_vector(model.parameters()),
    "foreach": lambda model, _: torch._foreach_norm(list(model.parameters())),
    "converted": lambda model, _: weight(model).double(),
    "average": lambda model, _: torch.lerp(torch.zeros(16, 8), weight(model).detach(), 0.5),
    "compiled": lambda model, _: torch.compile(torch.norm, backend="eager")(weight(model)),
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
    "saved_optimizer_itself": lambda _, optimizer: frozen(saved(optimizer).state_dict()),
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
#: C++ takes these without asking the tensor's class, so they need a flush before.
AFTER_A_FLUSH: dict[str, Look] = {"tensor": lambda model, _: copied(flushed(weight(model)))}
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
    "dlpack": lambda model, _: dlpack.from_dlpack(weight(model).grad).clone(),
    "array": lambda model, _: numpy.asarray(weight(model).grad).tolist(),
    "numpy": lambda model, _: weight(model).grad.numpy().tolist(),
    "copied": lambda model, _: copy.deepcopy(weight(model).grad),
    "finite": lambda model, _: torch.isfinite(weight(model).grad).all(),
    "scaled": lambda model, _: weight(model).grad.mul_(2.0).clone(),
    "listed": lambda model, _: torch.cat([p.grad.flatten() for p in model.parameters()]),
    "replaced": lambda model, _: setattr(weight(model), "grad", weight(model).grad + 1.0),
}
CLIPPINGS: dict[str, Look] = {
    "norm": lambda model, _: clip_grad_norm_(model.parameters(), 0.01),
    "norm_one_by_one": lambda model, _: clip_grad_norm_(model.parameters(), 0.01, foreach=False),
    "value": lambda model, _: clip_grad_value_(model.parameters(), 0.001),
    "total_norm": lambda model, _: nn.utils.get_total_norm([p.grad for p in model.parameters()]),
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
    "after_a_flush": AFTER_A_FLUSH,
    "weights_unasked": unasked(weight),
    "gradients_unasked": unasked(lambda model: weight(model).grad),
    "metadata": METADATA,
    "gradient_reads": GRADIENT_READS,
    "clippings": CLIPPINGS,
    "gradient_metadata": GRADIENT_METADATA,
}
BEFORE_STEP = {"gradients_unasked", "gradient_reads", "clippings", "gradient_metadata"}
#: these come back at once
WITHOUT_VALUES = {"metadata", "gradient_metadata"}
