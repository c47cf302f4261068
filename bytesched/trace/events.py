"""Events of the Chrome trace format, as one line of JSON in ASCII each."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, Literal

__all__ = ["flow_event", "mark_event", "metadata_event", "slice_event"]

MAX_NAME_CHARS = 200
MAX_ARGS_CHARS = 2000

_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def slice_event(
    pid: int, tid: int, category: str, name: str, at_ns: int, duration_ns: int, args: dict[str, Any]
) -> str:
    """Return a slice: something that took a while on one thread."""
    return (
        f'{{"ph":"X","cat":{_json(category)},"name":{_json(name[:MAX_NAME_CHARS])},'
        f'"pid":{pid},"tid":{tid},"ts":{_us(at_ns)},"dur":{_us(duration_ns)},'
        f'"args":{_json_args(args)}}}'
    )


def flow_event(pid: int, tid: int, phase: Literal["s", "t", "f"], flow: int, at_ns: int) -> str:
    """Return the start, a step or the end of an arrow, tied to the slice around its moment."""
    return (
        f'{{"ph":"{phase}","bp":"e","cat":"task","name":"task","id":"{flow:#x}",'
        f'"pid":{pid},"tid":{tid},"ts":{_us(at_ns)}}}'
    )


def mark_event(pid: int, tid: int, name: str, at_ns: int, args: dict[str, Any]) -> str:
    """Return a moment that concerns the whole process."""
    return (
        f'{{"ph":"i","s":"p","cat":"mark","name":{_json(name)},"pid":{pid},"tid":{tid},'
        f'"ts":{_us(at_ns)},"args":{_json_args(args)}}}'
    )


def metadata_event(pid: int, tid: int, name: str, args: dict[str, Any]) -> str:
    """Return a fact about a process or a thread."""
    return f'{{"ph":"M","name":{_json(name)},"pid":{pid},"tid":{tid},"args":{_json_args(args)}}}'


def _us(time_ns: int) -> str:
    """Return microseconds, exact to the nanosecond."""
    sign = "-" if time_ns < 0 else ""
    return f"{sign}{abs(time_ns) // 1000}.{abs(time_ns) % 1000:03d}"


@lru_cache(maxsize=4096)
def _json(text: str) -> str:
    return _encode(text)


def _json_args(args: dict[str, Any]) -> str:
    """Return arguments as JSON, as text where they are nothing that JSON knows."""
    try:
        text = _encode(args)
    except (TypeError, ValueError):
        text = _encode({str(name): str(value) for name, value in args.items()})
    return text if len(text) <= MAX_ARGS_CHARS else '{"omitted":"too long"}'
