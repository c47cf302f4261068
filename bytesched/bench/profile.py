"""Compute profiles: what a model computes and sends, layer by layer, without the model.

A profile is a JSON file. `bytesched bench --emulate` runs one, `bytesched bench --record` writes
one from a real model, and four are part of the package: gpt, moe, vgg and resnet. Those of several
batch sizes in one file are for `bytesched burst plan` alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bytesched.errors import ConfigError
from bytesched.files import write_text
from bytesched.link.bound import Layer
from bytesched.values import nearest

SHIPPED_FOLDER = Path(__file__).parent / "profiles"
ELEMENT_BYTES = 4


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """One layer, in forward order: how long it computes, and the shapes of its parameters."""

    name: str
    forward_ms: float
    backward_ms: float
    shapes: tuple[tuple[int, ...], ...]
    #: what the next layer reads, of one sample; 0 if that is not known
    output_bytes: int = 0
    #: of experts: what each rank hands to the all-to-all before the layer, and to that after it, in
    #: forward and in backward, the part that it keeps included; 0: there are none
    exchange_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of its float32 gradients."""
        return ELEMENT_BYTES * sum(math.prod(shape) for shape in self.shapes)


@dataclass(frozen=True, slots=True)
class Profile:
    """A model as a chain of layers."""

    name: str
    description: str
    layers: tuple[LayerProfile, ...]
    #: samples that its times are for; 0 if that is not known
    batch: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def exchanged_bytes(self) -> int:
        """Bytes that a rank hands to all-to-alls in an iteration: four of them for each layer."""
        return 4 * sum(layer.exchange_bytes for layer in self.layers)

    @property
    def compute_s(self) -> float:
        """Seconds of one forward and one backward pass."""
        return sum(layer.forward_ms + layer.backward_ms for layer in self.layers) / 1e3

    def scaled(self, factor: float) -> Profile:
        """The same model on a device that takes `factor` times as long."""
        layers = tuple(
            replace(
                layer,
                forward_ms=layer.forward_ms * factor,
                backward_ms=layer.backward_ms * factor,
            )
            for layer in self.layers
        )
        return replace(self, layers=layers)

    def chain(self) -> list[Layer]:
        """The layers as `bytesched.link.bound` wants them."""
        return [
            Layer(
                layer.forward_ms / 1e3, layer.backward_ms / 1e3, layer.nbytes, layer.exchange_bytes
            )
            for layer in self.layers
        ]

    def to_json(self) -> dict[str, Any]:
        """The content of a profile file."""
        layers = [
            {
                "name": layer.name,
                "forward_ms": round(layer.forward_ms, 4),
                "backward_ms": round(layer.backward_ms, 4),
                "shapes": [list(shape) for shape in layer.shapes],
                **({"output_bytes": layer.output_bytes} if layer.output_bytes else {}),
                **({"exchange_bytes": layer.exchange_bytes} if layer.exchange_bytes else {}),
            }
            for layer in self.layers
        ]
        batch = {"batch": self.batch} if self.batch else {}
        return {"name": self.name, "description": self.description, **batch, "layers": layers}

    def save(self, path: str) -> None:
        """Write the profile, one line per layer."""
        content = self.to_json()
        lines = ",\n".join(f"    {json.dumps(layer)}" for layer in content.pop("layers"))
        head = ",\n".join(f"  {json.dumps(key)}: {json.dumps(content[key])}" for key in content)
        write_text(Path(path), f'{{\n{head},\n  "layers": [\n{lines}\n  ]\n}}\n')


def save_all(profiles: Sequence[Profile], path: str) -> None:
    """Write one profile, or those of a model at growing batch sizes for the burst planner."""
    first = profiles[0]
    if len(profiles) == 1:
        first.save(path)
        return
    layers = [
        {
            "name": at_sizes[0].name,
            "forward_ms": [round(layer.forward_ms, 4) for layer in at_sizes],
            "backward_ms": [round(layer.backward_ms, 4) for layer in at_sizes],
            "parameter_bytes": at_sizes[0].nbytes,
            "output_bytes": at_sizes[0].output_bytes,
        }
        for at_sizes in zip(*(profile.layers for profile in profiles), strict=True)
    ]
    content = {
        "name": first.name,
        "description": first.description,
        "batches": [profile.batch for profile in profiles],
        "layers": layers,
    }
    write_text(Path(path), json.dumps(content, indent=1) + "\n")


def shipped_profiles() -> list[str]:
    """Names of the profiles that are part of the package."""
    return profiles_in(SHIPPED_FOLDER)


def profiles_in(folder: Path) -> list[str]:
    """Names of the profiles in ``folder``."""
    return sorted(path.stem for path in folder.glob("*.json"))


def load_profile(name_or_path: str) -> Profile:
    """The shipped profile of that name, or the one in that file.

    Raises `ConfigError` that names the layer and the field that are wrong.
    """
    return parse_profile(*read_profile(name_or_path, SHIPPED_FOLDER))


def read_profile(name_or_path: str, folder: Path) -> tuple[object, str]:
    """The decoded JSON of a profile in ``folder``, by name, or of a file; and its path.

    Raises `ConfigError` for what is not there, or no JSON.
    """
    path = Path(name_or_path)
    if path.suffix != ".json":
        path = folder / f"{name_or_path}.json"
        if not path.is_file():
            raise ConfigError(
                f"no profile {name_or_path!r}{nearest(name_or_path, profiles_in(folder))} "
                "(or the path of a .json file)"
            )
    try:
        content: object = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"profile {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"profile {path} is not valid JSON: {error}") from None
    return content, str(path)


def parse_profile(content: object, origin: str) -> Profile:
    """The profile that decoded JSON describes; `origin` is where it came from."""
    if not isinstance(content, dict) or not isinstance(content.get("layers"), list):
        raise ConfigError(f"profile {origin}: expected an object with a list of layers")
    if "batches" in content:
        raise ConfigError(
            f"profile {origin} is of several batch sizes, for `bytesched burst plan`; record one"
        )
    layers = tuple(
        _parse_layer(layer, f"profile {origin}, layer {index}")
        for index, layer in enumerate(content["layers"])
    )
    profile = Profile(
        str(content.get("name", Path(origin).stem)),
        str(content.get("description", "")),
        layers,
        _whole_number(content, "batch", f"profile {origin}"),
    )
    if profile.nbytes == 0:
        raise ConfigError(f"profile {origin}: no layer has parameters, so nothing would be sent")
    if profile.compute_s == 0:
        raise ConfigError(f"profile {origin}: every layer takes 0 ms")
    return profile


def _parse_layer(content: object, where: str) -> LayerProfile:
    if not isinstance(content, dict):
        raise ConfigError(f"{where}: expected an object, found {content!r}")
    times = []
    for field in ("forward_ms", "backward_ms"):
        value = content.get(field)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{where}: {field} is {value!r}, expected milliseconds")
        if not 0 <= value < math.inf:
            raise ConfigError(f"{where}: {field} is {value}, expected a time of 0 ms or more")
        times.append(float(value))
    shapes = content.get("shapes")
    if not isinstance(shapes, list) or not all(map(_is_shape, shapes)):
        raise ConfigError(f"{where}: shapes is {shapes!r}, expected lists of positive sizes")
    name = str(content.get("name", where.rpartition(" ")[2]))
    output_bytes = _whole_number(content, "output_bytes", where)
    exchange_bytes = _whole_number(content, "exchange_bytes", where)
    if exchange_bytes and shapes:
        raise ConfigError(
            f"{where}: shapes is {shapes!r}, expected none beside exchange_bytes: gradients of "
            "experts stay on their rank"
        )
    return LayerProfile(
        name, times[0], times[1], tuple(map(tuple, shapes)), output_bytes, exchange_bytes
    )


def _whole_number(content: dict[str, Any], field: str, where: str) -> int:
    """A field that may be left out, which is 0."""
    value = content.get(field, 0)
    if type(value) is not int or value < 0:
        raise ConfigError(f"{where}: {field} is {value!r}, expected a whole number")
    return value


def _is_shape(shape: object) -> bool:
    return (
        isinstance(shape, Sequence)
        and not isinstance(shape, str)
        and all(type(size) is int and size > 0 for size in shape)
    )
