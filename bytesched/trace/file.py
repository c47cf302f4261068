"""Trace files: events of the Chrome trace format, a line each, written and read again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from bytesched.files import replacing

#: One entry of a Chrome trace.
Event = dict[str, Any]

TAIL = b"\n]\n"

_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def event_line(
    phase: str,
    pid: int,
    tid: int,
    name: str,
    at_ns: int | None = None,
    *,
    args: dict[str, Any] | None = None,
    **fields: object,
) -> str:
    """Return an event as JSON in ASCII; arguments that JSON does not know are written as text."""
    event: Event = {"ph": phase, "name": name, "pid": pid, "tid": tid, **fields}
    if at_ns is not None:
        event["ts"] = at_ns / 1000
    if args is not None:
        event["args"] = args
    try:
        return _encode(event)
    except (TypeError, ValueError):
        event["args"] = {str(key): str(value) for key, value in (args or {}).items()}
        return _encode(event)


class TraceFile:
    """A JSON array of events on disk, to which records are added by one write each time.

    A write goes over the closing bracket and ends in a new one, so what a kill leaves is whole,
    or breaks off within the last write. One thread at a time.
    """

    def __init__(self, path: Path, first: str, *, max_bytes: int) -> None:
        """Replace ``path`` by an array of the records ``first``; raise ``OSError`` if denied."""
        self.path = path
        #: some records found no room within ``max_bytes``
        self.is_full = False
        self._max_bytes = max_bytes
        head = b"[\n" + first.encode("ascii")
        self._used_bytes = len(head)
        with replacing(path) as file:
            file.write(head + TAIL)
            self._file = os.fdopen(os.dup(file.fileno()), "r+b")

    def append(self, records: Iterable[str]) -> None:
        """Write records, each one JSON value in ASCII, by one write."""
        batch = bytearray()
        for record in records:
            entry = b",\n" + record.encode("ascii")
            if self._used_bytes + len(batch) + len(entry) + len(TAIL) > self._max_bytes:
                self.is_full = True
                break
            batch += entry
        if not batch or self._file.closed:
            return
        view, at = memoryview(batch + TAIL), self._used_bytes
        self._used_bytes += len(batch)
        while view:
            written = os.pwrite(self._file.fileno(), view, at)
            at += written
            view = view[written:]

    def close(self) -> None:
        """Let go of the file. Idempotent."""
        self._file.close()


def load_events(path: Path) -> tuple[list[Event], bool]:
    """Return the events of a Chrome trace file and whether the file was whole.

    Of a file of ours that breaks off, the events before the break are returned. Raises ``OSError``
    if it cannot be read and ``ValueError`` if it holds no event at all.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError("not a text file") from error
    try:
        content, whole = json.loads(text), True
    except json.JSONDecodeError:
        content, whole = _whole_lines(text), False
    if isinstance(content, dict):
        content = content.get("traceEvents")
    events = [event for event in content if _is_event(event)] if isinstance(content, list) else []
    if not events:
        raise ValueError("holds no trace event")
    return events, whole


def _is_event(value: object) -> bool:
    kinds: dict[str, Any] = {"ts": int | float, "dur": int | float, "args": dict}
    return (
        isinstance(value, dict)
        and isinstance(value.get("ph"), str)
        and all(isinstance(value[name], kind) for name, kind in kinds.items() if name in value)
    )


def _whole_lines(text: str) -> list[Any]:
    """What `TraceFile` wrote, an event in each line, up to one that is none."""
    values: list[Any] = []
    with suppress(json.JSONDecodeError):
        for line in text.splitlines()[1:]:
            values.append(json.loads(line.removesuffix(",")))
    return values
