"""Every known optimizer of another package, plainly and deferred; a line of JSON for each.

The wire is a thread of this process, which holds back what it carries until `step()` is over.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
from loopback import Loopback
from looped import TIMEOUT_S, Training, check_equal, inputs
from torch import nn
from torch.optim import Optimizer

from bytesched.plugins.proxies.pending import is_held
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


def trained(loopback: Loopback | None, kind: Any, arguments: dict[str, Any]) -> Training:
    """In several groups, with a schedule, a closure, an evaluation, and parameters without use."""

    def optimizer_of(model: nn.Module) -> Optimizer:
        first, *others = model.parameters()
        unused = nn.Parameter(torch.ones(3))
        made: Optimizer = kind([{"params": [first]}, {"params": [*others, unused]}], **arguments)
        return made

    training = Training(loopback, optimizer_of)
    optimizer: Any = training.optimizer
    evaluates = hasattr(optimizer, "eval")
    for step in range(18):
        if evaluates:
            optimizer.train()
        if loopback is not None and step > 2:
            loopback.hold()
        if step % 5 == 4:
            # transformers leaves this to the closure.
            @torch.enable_grad()
            def closure() -> Any:
                optimizer.zero_grad()
                loss = training.model(inputs(training.step_number)).square().mean()
                loss.backward()
                return loss.detach()

            assert optimizer.step(closure) >= 0
        else:
            training.backward()
            assert optimizer.step() is None
        if loopback is not None and step > 2:
            weights = [p for group in optimizer.param_groups for p in group["params"][:4]]
            assert all(is_held(p) for p in weights), "stepped whole"
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] and group["lr"] * 0.9
        if loopback is not None:
            loopback.release()
        if evaluates and step % 4 == 3:
            training.flush()
            optimizer.eval()
    training.flush()
    return training


def outcomes(name: str) -> Iterator[tuple[dict[str, Any], str]]:
    for arguments in ({}, *VARIANTS[name]):
        arguments = {**NEEDS.get(name, {}), **arguments}
        loopback = Loopback(timeout_s=TIMEOUT_S)
        try:
            ours = trained(loopback, found(name), arguments)
            plain = trained(None, found(name), arguments)
            check_equal(ours, plain)
            groups = [training.optimizer.state_dict()["param_groups"] for training in (ours, plain)]
            assert groups[0] == groups[1]
            yield arguments, ""
        except Exception as error:  # noqa: BLE001 - the test shows it
            yield arguments, f"{type(error).__name__}: {error}"
        finally:
            loopback.release()
            loopback.close()


if __name__ == "__main__":
    assert VARIANTS.keys() == KNOWN.keys()
    for name in KNOWN:
        for arguments, error in outcomes(name):
            print(json.dumps({"name": name, "arguments": arguments, "error": error}), flush=True)
