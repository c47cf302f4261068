"""Profiles as chains of what can be cut into stages."""

from __future__ import annotations

import math
from typing import Any

from bytesched.bench.profile import SHIPPED_FOLDER, parse_profile, read_profile
from bytesched.errors import ConfigError
from bytesched.pipeline.stages import Stage
from bytesched.values import nearest, shown

__all__ = ["load_chain"]

_MOST_S = 1e6
_HALVES = ("backward_input_s", "backward_weight_s")
_SIZES = ("activation_bytes", "output_bytes", "parameter_bytes")
#: of a stage; its name is for people
_FIELDS = ("forward_s", "backward_s", *_HALVES, *_SIZES, "name")


def load_chain(name_or_path: str) -> tuple[Stage, ...]:
    """The layers of a profile of ``bytesched bench``, or the stages of a file that lists those.

    A layer's backward is cut in halves, and it holds what it hands to the next layer. A list of
    ``stages`` says all that itself. Raises ``ConfigError`` that names stage or layer, and field.
    """
    content, origin = read_profile(name_or_path, SHIPPED_FOLDER)
    if isinstance(content, dict) and "stages" in content:
        stages = content["stages"]
        if not isinstance(stages, list) or not stages:
            raise ConfigError(f"profile {origin}: stages is {shown(stages)}, expected a list")
        chain = tuple(_stage(each, f"profile {origin}, stage {n}") for n, each in enumerate(stages))
        if not any(each.compute_s for each in chain):
            raise ConfigError(f"profile {origin}: every stage takes 0 s")
        return chain
    profile = parse_profile(content, origin)
    samples = max(1, profile.batch)
    return tuple(
        Stage(
            layer.forward_ms / 1e3,
            # Without weights, all of a backward is for the layer before.
            layer.backward_ms / (2e3 if layer.nbytes else 1e3),
            layer.backward_ms / 2e3 if layer.nbytes else 0.0,
            layer.output_bytes * samples,
            layer.output_bytes * samples,
            layer.nbytes,
        )
        for layer in profile.layers
    )


def _stage(content: object, where: str) -> Stage:
    if not isinstance(content, dict):
        raise ConfigError(f"{where}: expected an object, found {shown(content)}")
    for name in content:
        if name not in _FIELDS:
            raise ConfigError(f"{where}: {name!r} is no field{nearest(name, _FIELDS)}")
    if "backward_s" in content:
        if any(half in content for half in _HALVES):
            raise ConfigError(
                f"{where}: backward_s is there beside its halves, expected one of both"
            )
        input_s = weight_s = _time_s(content, "backward_s", where) / 2
    else:
        input_s = _time_s(content, _HALVES[0], where)
        weight_s = _time_s(content, _HALVES[1], where)
    return Stage(
        _time_s(content, "forward_s", where),
        input_s,
        weight_s,
        *(_bytes(content, size, where) for size in _SIZES),
    )


def _time_s(content: dict[str, Any], field: str, where: str) -> float:
    value = content.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{where}: {field} is {shown(value)}, expected seconds")
    if not (math.isfinite(value) and 0 <= value <= _MOST_S):
        raise ConfigError(f"{where}: {field} is {value}, expected from 0 to {_MOST_S:.0f} s")
    return float(value)


def _bytes(content: dict[str, Any], field: str, where: str) -> int:
    value = content.get(field, 0)
    if type(value) is not int or not 0 <= value < 1 << 50:
        raise ConfigError(f"{where}: {field} is {shown(value)}, expected a number of bytes")
    return value
