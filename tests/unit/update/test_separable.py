"""Only what is known is deferred: by its class, its version, its code and its groups."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

import bytesched
from bytesched.errors import PluginError
from bytesched.plugins.update.separable import (
    KNOWN,
    SEPARABLE,
    Known,
    why_not_deferred,
    why_not_sharded,
)
from bytesched.plugins.update.surroundings import snapshot, why_not_frozen


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, 2))]


@pytest.mark.parametrize("kind", list[Any](sorted(SEPARABLE, key=repr)))
def test_classes_of_torch_are_known(kind: Any) -> None:
    optimizer = kind(weights())
    # torch itself puts another step there.
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.callback = lambda: None
    assert why_not_deferred(optimizer, kind) == ""


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Adam, "step"),
        (Adam, "_init_group"),
        (sys.modules["torch.optim.adam"], "_single_tensor_adam"),
        (sys.modules["torch.optim.adam"], "adam"),
        (Optimizer, "_group_tensors_by_device_and_dtype"),
    ],
)
@pytest.mark.parametrize("made", ["before", "after"])
def test_code_that_was_replaced_is_not_known(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, made: str
) -> None:
    early = Adam(weights())
    original = getattr(owner, name)

    @functools.wraps(original)
    def other(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, other)
    # A new one has its class's step hooked again, whatever that is.
    optimizer = Adam(weights()) if made == "after" else early
    assert "has been replaced" in why_not_deferred(optimizer, Adam)


def test_a_method_of_an_instance_that_was_replaced_is_not_known() -> None:
    optimizer: Any = Adam(weights())
    optimizer._init_group = optimizer._init_group
    assert "_init_group of this Adam has been replaced" in why_not_deferred(optimizer, Adam)


def test_a_subclass_is_not_known_even_if_it_changes_nothing() -> None:
    class Mine(SGD):
        pass

    assert "Mine is not known" in why_not_deferred(Mine(weights()), Mine)


@pytest.fixture
def other() -> Iterator[types.ModuleType]:
    """A package with a class that is known by its name."""
    module = types.ModuleType("otherpackage.lion")
    sys.modules["otherpackage.lion"] = module
    exec(
        "import torch\n"
        "def update(*args): pass\n"
        "class Lion(torch.optim.SGD):\n"
        "    def step(self, closure=None): return super().step(closure)\n",
        vars(module),
    )
    yield module
    del sys.modules["otherpackage.lion"]


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("1.0", ""),
        ("1.2", ""),
        ("1.2.0", ""),
        ("1.2.1", "of otherpackage, 1.0 to 1.2 was read, and not 1.2.1"),
        ("0.9.9", "not 0.9.9"),
        ("1.1rc1", "not 1.1rc1"),
        ("1.1+local", "not 1.1+local"),
        ("", "not installed as a package"),
    ],
)
def test_a_class_is_known_in_the_versions_that_were_read(
    monkeypatch: pytest.MonkeyPatch, other: Any, version: str, reason: str
) -> None:
    def installed(package: str) -> str:
        if not version:
            raise metadata.PackageNotFoundError(package)
        return version

    monkeypatch.setitem(KNOWN, "otherpackage.lion.Lion", Known("otherpackage", "1.0", "1.2"))
    monkeypatch.setattr(metadata, "version", installed)
    optimizer = other.Lion(weights())
    why = why_not_deferred(optimizer, other.Lion)
    assert reason in why
    assert bool(why) == bool(reason)
    if not reason:
        optimizer.update_fn = other.update
        assert not why_not_deferred(optimizer, other.Lion)
        optimizer.update_fn = weights
        assert "is a function of another module" in why_not_deferred(optimizer, other.Lion)


def test_a_class_with_other_methods_over_its_state_is_not_sharded(
    monkeypatch: pytest.MonkeyPatch, other: Any
) -> None:
    known = Known("otherpackage", "1.0", "1.2", shards=False)
    monkeypatch.setitem(KNOWN, "otherpackage.lion.Lion", known)
    monkeypatch.setattr(metadata, "version", lambda _: "1.0")
    optimizer = other.Lion(weights())
    assert not why_not_deferred(optimizer, other.Lion)
    assert "need the state of all parameters" in why_not_sharded(optimizer, other.Lion)
    bytesched.separable(other.Lion)
    assert not why_not_sharded(optimizer, other.Lion)


@pytest.mark.parametrize(
    "value", [lambda: 1.0, object(), nn.Linear(1, 1), [0.1, lambda: 1.0], {"a": {"b": object()}}]
)
def test_a_group_that_cannot_be_frozen_steps_whole(value: Any) -> None:
    optimizer = SGD(weights(), lr=0.1)
    optimizer.param_groups[0]["warm"] = value
    assert "a parameter group holds 'warm'" in why_not_deferred(optimizer, SGD)


def test_a_snapshot_is_not_changed_afterwards() -> None:
    group: dict[str, Any] = {
        "params": [1],
        "param_names": ["a"],
        "lr": torch.tensor(1.0),
        "betas": [0.9, torch.tensor(0.99)],
        "more": {"a": [1, 2], "b": (1, [2]), "c": {3}},
        "dtype": torch.float32,
        "none": None,
    }
    taken = snapshot(group)
    assert not why_not_frozen([group])
    group["lr"].add_(1)
    group["betas"][1].add_(1)
    group["betas"][0] = 0.5
    group["more"]["a"].append(3)
    group["more"]["b"][1].append(3)
    assert taken == {
        "lr": torch.tensor(1.0),
        "betas": [0.9, torch.tensor(0.99)],
        "more": {"a": [1, 2], "b": (1, [2]), "c": {3}},
        "dtype": torch.float32,
        "none": None,
    }


def test_an_optimizer_is_explained() -> None:
    class Mine(SGD):
        def step(self) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.sub_(parameter.grad, alpha=group["lr"])

    assert bytesched.explain_optimizer(SGD(weights(), lr=0.1)).startswith("SGD updates each")
    said = bytesched.explain_optimizer(Mine(weights(), lr=0.1))
    assert "Mine is not known to update each parameter on its own" in said
    assert "if it does, say so: bytesched.separable(Mine)" in said
    with pytest.raises(PluginError, match="is not a torch optimizer"):
        bytesched.explain_optimizer(nn.Linear(1, 1))
