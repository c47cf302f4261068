"""Compute profiles: what a model computes and sends, layer by layer, without the model.

A profile is a JSON file. `bytesched bench --emulate` runs one, `bytesched bench --record` writes
one from a real model, and four are part of the package: gpt, moe, vgg and resnet. Those of several
batch sizes in one file are for `bytesched burst plan` alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bytesched.errors import ConfigError
from bytesched.files import write_text
from bytesched.link.bound import Layer
from bytesched.records import from_json
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
        layers = (
            replace(one, forward_ms=one.forward_ms * factor, backward_ms=one.backward_ms * factor)
            for one in self.layers
        )
        return replace(self, layers=tuple(layers))

    def chain(self) -> list[Layer]:
        """The layers as `bytesched.link.bound` wants them."""
        return [
            Layer(one.forward_ms / 1e3, one.backward_ms / 1e3, one.nbytes, one.exchange_bytes)
            for one in self.layers
        ]

    def layer_records(self) -> list[dict[str, Any]]:
        """The layers as a profile file has them."""
        return [
            {
                name: round(value, 4) if isinstance(value, float) else value
                for name, value in asdict(layer).items()
                if value or not name.endswith("_bytes")
            }
            for layer in self.layers
        ]


def save_profiles(profiles: Sequence[Profile], path: str) -> None:
    """Write one profile, or those of a model at growing batch sizes for the burst planner."""
    first = profiles[0]
    sizes: dict[str, Any] = {"batch": first.batch}
    layers = first.layer_records()
    if len(profiles) > 1:
        sizes = {"batches": [profile.batch for profile in profiles]}
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
    content = {"name": first.name, "description": first.description, **sizes, "layers": layers}
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
    where = f"profile {origin}"
    if not isinstance(content, dict) or not isinstance(content.get("layers"), list):
        raise ConfigError(f"{where}: expected an object with a list of layers")
    if "batches" in content:
        raise ConfigError(
            f"{where} is of several batch sizes, for `bytesched burst plan`; record one"
        )
    layers = [
        {"name": str(number), **layer} if isinstance(layer, dict) else layer
        for number, layer in enumerate(content["layers"])
    ]
    named = {"name": Path(origin).stem, "description": "", **content, "layers": layers}
    try:
        profile = from_json(Profile, json.dumps(named))
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    for number, layer in enumerate(profile.layers):
        if wrong := _wrong(layer):
            raise ConfigError(f"{where}, layer {number}: {wrong}")
    if profile.nbytes == 0:
        raise ConfigError(f"{where}: no layer has parameters, so nothing would be sent")
    if profile.batch < 0 or not 0 < profile.compute_s < math.inf:
        raise ConfigError(f"{where}: batch and the times of all layers: expected more than 0")
    return profile


def _wrong(layer: LayerProfile) -> str:
    """What a layer has that cannot be, or nothing."""
    if not (layer.forward_ms >= 0 and layer.backward_ms >= 0):
        return "forward_ms and backward_ms: expected a time of 0 ms or more"
    if layer.output_bytes < 0 or layer.exchange_bytes < 0:
        return "output_bytes and exchange_bytes: expected 0 or more"
    if any(size < 1 for shape in layer.shapes for size in shape):
        return "shapes: expected lists of positive sizes"
    if layer.exchange_bytes and layer.shapes:
        return "no shapes beside exchange_bytes: gradients of experts stay on their rank"
    return ""
