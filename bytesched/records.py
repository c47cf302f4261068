"""Frozen dataclasses as JSON, and back with every field checked against its type."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

__all__ = ["from_json", "to_json"]

RecordT = TypeVar("RecordT")


def to_json(record: Any) -> str:
    """The dataclass ``record`` in one line."""
    return json.dumps(dataclasses.asdict(record))


def from_json(kind: type[RecordT], text: str) -> RecordT:
    """The dataclass ``kind`` that `to_json` wrote.

    Raises ``ValueError`` that names the field, for what is missing, unknown or of another type.
    """
    try:
        content = json.loads(text)
        record: RecordT = _read(kind, content, kind.__name__)
    except RecursionError as error:
        raise ValueError(f"no valid JSON: {error}") from None
    return record


def _read(kind: Any, value: Any, where: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in (Any, object):
        return value
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return _record(kind, value, where)
    if origin in (Union, UnionType):
        if value is None and NoneType in arguments:
            return None
        [kind] = [one for one in arguments if one is not NoneType]
        return _read(kind, value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(_read(arguments[0], item, f"{where}[{n}]") for n, item in enumerate(value))
    if origin is dict and isinstance(value, Mapping):
        return {name: _read(arguments[1], item, f"{where}.{name}") for name, item in value.items()}
    if kind is float and type(value) is int:
        return float(value)
    if kind in (bool, int, float, str) and type(value) is kind:
        return value
    raise ValueError(f"{where} is {value!r:.60}, not {getattr(kind, '__name__', kind)}")


def _record(kind: Any, content: Mapping[str, Any], where: str) -> Any:
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if strange := sorted(content.keys() - fields.keys()):
        raise ValueError(f"{where} has no {strange[0]!r}")
    needed = {name for name, field in fields.items() if field.default is dataclasses.MISSING}
    if missing := sorted(needed - content.keys()):
        raise ValueError(f"{where} needs {missing[0]!r}")
    types = get_type_hints(kind)
    return kind(
        **{name: _read(types[name], item, f"{where}.{name}") for name, item in content.items()}
    )
