"""Every known optimizer of another package, plainly and deferred; a line of JSON for each.

The wire is in this process: what it carries has not come when `step()` is over.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
from fake_wire import FakeWire, Run, inputs
from torch import Tensor, nn
from torch.optim import Optimizer

from bytesched.plugins.update.separable import KNOWN

#: what is tried beside the defaults
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "lion_pytorch.lion_pytorch.Lion": [
        {"lr": 0.01, "weight_decay": 0.1},
        {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True},
    ],
    "schedulefree.adamw_schedulefree.AdamWScheduleFree": [
        {"warmup_steps": 4, "weight_decay": 0.1},
        {"r": 1.0, "foreach": False},
    ],
    "schedulefree.radam_schedulefree.RAdamScheduleFree": [{"weight_decay": 0.1}],
    "schedulefree.sgd_schedulefree.SGDScheduleFree": [
        {"lr": 0.1, "warmup_steps": 4, "weight_decay": 0.1}
    ],
    "timm.optim.adafactor_bv.AdafactorBigVision": [
        {"min_dim_size_to_factor": 4, "caution": True, "weight_decay": 0.1}
    ],
    "timm.optim.adamp.AdamP": [{"nesterov": True, "weight_decay": 0.1, "caution": True}],
    "timm.optim.lion.Lion": [{"caution": True, "weight_decay": 0.1}, {"foreach": True}],
    "timm.optim.nadamw.NAdamW": [{"weight_decay": 0.1, "caution": True}, {"foreach": True}],
    "timm.optim.rmsprop_tf.RMSpropTF": [
        {"momentum": 0.9, "centered": True, "weight_decay": 0.1},
        {"foreach": True, "momentum": 0.9, "caution": True},
    ],
    "timm.optim.sgdp.SGDP": [{"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}],
    "timm.optim.sgdw.SGDW": [
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"lr": 0.1, "momentum": 0.9, "caution": True, "foreach": True},
    ],
    "transformers.optimization.Adafactor": [
        {"lr": 0.01, "relative_step": False, "beta1": 0.9, "weight_decay": 0.1},
        {"warmup_init": True},
    ],
}
#: without defaults for all arguments
NEEDS = {"timm.optim.sgdp.SGDP": {"lr": 0.1}}


def found(name: str) -> Any:
    """The class of that name, from its own file."""
    if name.startswith("timm.") and "timm" not in sys.modules:
        # All of timm needs torchvision, its optimizers do not.
        package, models = types.ModuleType("timm"), types.ModuleType("timm.models")
        spec = find_spec("timm")
        assert spec is not None
        package.__path__ = list(spec.submodule_search_locations or ())
        models.group_parameters = None  # type: ignore[attr-defined]
        sys.modules.update({"timm": package, "timm.models": models})
    module, _, kind = name.rpartition(".")
    return getattr(importlib.import_module(module), kind)


def trained(wire: FakeWire | None, kind: Any, arguments: dict[str, Any]) -> Run:
    """In several groups, with a schedule, a closure, an evaluation, and parameters without use."""

    def optimizer_of(parameters: Iterable[Tensor]) -> Optimizer:
        first, *others = parameters
        unused = nn.Parameter(torch.ones(3))
        made: Optimizer = kind([{"params": [first]}, {"params": [*others, unused]}], **arguments)
        return made

    run = Run(wire, is_plain=True, optimizer_of=optimizer_of)
    optimizer: Any = run.optimizer
    evaluates = hasattr(optimizer, "eval")
    for step in range(18):
        if evaluates:
            optimizer.train()
        if step % 5 == 4:
            # transformers leaves this to the closure.
            @torch.enable_grad()
            def closure() -> Any:
                optimizer.zero_grad()
                loss = run.model(inputs(run.steps)).square().mean()
                loss.backward()
                return loss.detach()

            assert optimizer.step(closure) >= 0
        else:
            optimizer.zero_grad()
            run.backward()
            assert optimizer.step() is None
        assert wire is None or step < 3 or len(run.held) == len(run.slots), "stepped whole"
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] and group["lr"] * 0.9
        run.let()
        if evaluates and step % 4 == 3:
            if wire is not None:
                run.session.flush()
            optimizer.eval()
    return run


def outcomes(name: str) -> Iterator[tuple[dict[str, Any], list[str]]]:
    for arguments in ({}, *VARIANTS[name]):
        arguments = {**NEEDS.get(name, {}), **arguments}
        ours = trained(FakeWire(size=1), found(name), arguments)
        plain = trained(None, found(name), arguments)
        wrong = ours.differences(plain)
        groups = [run.optimizer.state_dict()["param_groups"] for run in (ours, plain)]
        if groups[0] != groups[1]:
            wrong.append("groups differ")
        yield arguments, wrong
        ours.close()


if __name__ == "__main__":
    assert VARIANTS.keys() == KNOWN.keys()
    for name in KNOWN:
        for arguments, wrong in outcomes(name):
            print(json.dumps({"name": name, "arguments": arguments, "wrong": wrong}), flush=True)
