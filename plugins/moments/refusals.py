"""What gradients that are folded into moments cannot be trained with, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from bytesched.config import Config
from bytesched.errors import ConfigError, PluginError

from .folding import Accumulation
from .slots import MomentSlot

ADAMA: Final = "adama"


def check_request(accumulate: Any, micro_batches: Any) -> None:
    """Raises ConfigError for what is wrong with these two arguments of ``wrap``."""
    if accumulate not in (None, ADAMA):
        raise ConfigError(f"accumulate = {accumulate!r}: {ADAMA!r}, or leave it out")
    if type(micro_batches) is not int or micro_batches < 1:
        raise ConfigError(
            f"micro_batches = {micro_batches!r}: a whole number, at least 1, of backward passes "
            "before each step()"
        )
    if accumulate is None and micro_batches != 1:
        raise ConfigError(
            f"micro_batches = {micro_batches} without accumulate = {ADAMA!r}: ordinary "
            "accumulation needs no_sync() alone"
        )


def folding_statements(
    accumulation: Accumulation,
    slots: Sequence[MomentSlot],
    config: Config,
    *,
    find_unused: bool | None,
    has_groups: bool,
) -> list[str]:
    """What all ranks must agree on. Raises PluginError for what it is not there for."""
    _refuse_settings(accumulation.optimizer, config, find_unused, has_groups)
    _refuse_slots(slots, accumulation.optimizer)
    return [f"accumulate = {ADAMA!r}, micro_batches = {accumulation.micro_batches}"]


def _refuse_settings(
    optimizer: torch.optim.Optimizer, config: Config, find_unused: bool | None, has_groups: bool
) -> None:
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        raise PluginError(
            f"accumulate='adama' folds gradients into the moments of Adam and AdamW, and this is a "
            f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        )
    for name, is_set, why in (
        ("split = 'on'", config.split == "on", "there is no gradient whose norm could be asked"),
        (
            f"compression = {config.compression!r}",
            config.compression != "none",
            "moments are kept from step to step, and would lose what is rounded away",
        ),
        (
            "find_unused_parameters = True",
            bool(find_unused),
            "moments of a parameter that no rank uses would change",
        ),
        ("groups", has_groups, "moments are summed over all ranks"),
        (
            "differentiable = True",
            any(group["differentiable"] for group in optimizer.param_groups),
            "a step has no graph",
        ),
    ):
        if is_set:
            raise PluginError(f"accumulate='adama' and {name}: {why}; leave one of them out")


def _refuse_slots(slots: Sequence[MomentSlot], optimizer: torch.optim.Optimizer) -> None:
    managed = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for slot in slots:
        if id(slot.parameter) not in managed:
            raise PluginError(
                f"accumulate='adama': parameter {slot.name!r} requires a gradient, and is not in "
                "the optimizer"
            )
        if slot.parameter.is_complex():
            raise PluginError(f"accumulate='adama': parameter {slot.name!r} is complex")
