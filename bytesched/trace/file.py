"""Trace files: written so that they are valid JSON at every moment, read even when they are not."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from bytesched.files import replacing

__all__ = ["Event", "TraceFile", "load_events"]

#: One entry of a Chrome trace.
Event = dict[str, Any]

#: A SIGKILL can end a write between two pages, never inside one. Larger pages are multiples.
PAGE_BYTES = 4096
FIRST_CAPACITY_BYTES = 256 << 10
COPY_BYTES = 1 << 20
TAIL = b"\n]\n"


class TraceFile:
    """A JSON array of events on disk that a kill at any moment leaves valid.

    The file ends in blanks and a closing bracket. A batch of records is one write over the
    blanks, laid out so that no record crosses a page: whatever part of the write survives, the
    array holds whole records only. When the blanks run out a copy of twice the size takes the
    file's place by a rename. One thread at a time.
    """

    def __init__(self, path: Path, first: str, *, max_bytes: int) -> None:
        """Replace ``path`` by an array of the one record ``first``; raise ``OSError`` if denied."""
        self.path = path
        #: records that found no room: longer than a page, or beyond ``max_bytes``
        self.left_out = 0
        self._max_bytes = max_bytes
        self._file: BinaryIO | None = None
        head = b"[\n" + first.encode("ascii")
        self._used_bytes = len(head)
        self._move([head], FIRST_CAPACITY_BYTES)

    def append(self, records: Iterable[str]) -> None:
        """Write records, each one JSON value in ASCII, by one write."""
        if self._file is None:
            return
        batch = bytearray()
        at = self._used_bytes
        for record in records:
            entry = b",\n" + record.encode("ascii")
            room = PAGE_BYTES - at % PAGE_BYTES
            padding = room if len(entry) > room else 0
            following = at + padding + len(entry)
            if len(entry) > PAGE_BYTES or following + len(TAIL) > self._max_bytes:
                self.left_out += 1
                continue
            batch += b" " * padding + entry
            at = following
        if not batch:
            return
        if at + len(TAIL) > self._capacity_bytes:
            capacity = self._capacity_bytes
            while at + len(TAIL) > capacity:
                capacity *= 2
            self._move(self._content(), capacity)
        view = memoryview(batch)
        while view:
            written = os.pwrite(self._file.fileno(), view, self._used_bytes)
            self._used_bytes += written
            view = view[written:]

    def close(self) -> None:
        """Drop the blanks and let go of the file. Idempotent."""
        if self._file is not None:
            self._move(self._content(), self._used_bytes + len(TAIL))
            self.abandon()

    def abandon(self) -> None:
        """Let go of the file as it is. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _content(self) -> Iterator[bytes]:
        assert self._file is not None
        for at in range(0, self._used_bytes, COPY_BYTES):
            yield os.pread(self._file.fileno(), min(COPY_BYTES, self._used_bytes - at), at)

    def _move(self, content: Iterable[bytes], capacity_bytes: int) -> None:
        """Put ``content``, blanks and the closing bracket in the file's place by one rename."""
        with replacing(self.path) as file:
            for block in content:
                file.write(block)
            blanks = capacity_bytes - self._used_bytes - len(TAIL)
            for at in range(0, blanks, COPY_BYTES):
                file.write(b" " * min(COPY_BYTES, blanks - at))
            file.write(TAIL)
            descriptor = os.dup(file.fileno())
        self.abandon()
        self._file = os.fdopen(descriptor, "r+b")
        self._capacity_bytes = capacity_bytes


def load_events(path: Path) -> tuple[list[Event], bool]:
    """Return the events of a Chrome trace file and whether the file was whole.

    Of a truncated file the events before the break are returned. Raises ``OSError`` if it cannot
    be read and ``ValueError`` if it holds no event at all.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError("not a text file") from error
    try:
        content = json.loads(text)
        if isinstance(content, dict):
            content = content.get("traceEvents")
        whole = True
    except json.JSONDecodeError:
        content = _decode_until_broken(text)
        whole = False
    events = [event for event in content if _is_event(event)] if isinstance(content, list) else []
    if not events:
        raise ValueError("holds no trace event")
    return events, whole


def _is_event(value: object) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("ph"), str)
        and isinstance(value.get("ts", 0), int | float)
        and isinstance(value.get("dur", 0), int | float)
        and isinstance(value.get("args", {}), dict)
    )


def _decode_until_broken(text: str) -> list[Any]:
    decoder = json.JSONDecoder()
    values: list[Any] = []
    at = text.find("[") + 1
    while at:
        while at < len(text) and text[at] in ", \t\r\n":
            at += 1
        try:
            value, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError:
            break
        values.append(value)
    return values
