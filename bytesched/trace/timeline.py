"""The timeline: an observer that writes a Chrome trace per rank."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections import deque
from errno import ENOSPC
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, Protocol

from bytesched.config import Config
from bytesched.errors import ConfigError
from bytesched.files import replacing
from bytesched.observe import Observer, Observers
from bytesched.trace.reading import ANCHOR, Event

log = logging.getLogger("bytesched")

#: In the order in which a viewer shows them.
TRACKS = ("step", "forward", "backward", "graph", "queue", "send", "wait", "urgent", "update")

LANES_PER_TRACK = 1000
TIDS_PER_RANK = 100 * LANES_PER_TRACK
#: The first record, which tells our files from others, ends before.
HEAD_BYTES = 4096
_TAIL = b"\n]\n"
#: events between two steps, beyond which they are dropped and counted
MOST_PENDING = 1 << 17
#: of a file, in which tracing ends then
MOST_BYTES = 256 << 20


class _Ranks(Protocol):
    rank: int

    def of_leader(self, number: int) -> int:
        """Rank 0's ``number``, on all ranks; collective."""


def observers_of(ranks: _Ranks, config: Config) -> Observers:
    """The observers of one session; collective."""
    if not config.timeline:
        return Observers()
    for _ in range(3):
        # The last one ends at nearly the same moment everywhere.
        ranks.of_leader(0)
    mine_ns = time.time_ns()
    return observers_here(ranks.rank, config, clock_offset_ns=ranks.of_leader(mine_ns) - mine_ns)


def observers_here(rank: int, config: Config, *, clock_offset_ns: int = 0) -> Observers:
    """The observers of one session; by this host's own clock, unless its offset is known."""
    if not config.timeline:
        return Observers()
    return Observers([Timeline(config.timeline, rank=rank, clock_offset_ns=clock_offset_ns)])


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


class _Span(NamedTuple):
    start_ns: int
    end_ns: int
    track: str
    name: str
    args: dict[str, Any] | None


def trace_name(rank: int | str) -> str:
    """Return the name of a rank's trace file; with "*", the pattern of them all."""
    return f"rank{rank}.trace.json"


class Timeline(Observer):
    """Writes `rank{n}.trace.json` for chrome://tracing and ui.perfetto.dev.

    A hook only appends to a queue of bounded length; the thread that calls `on_step` writes what
    has gathered, by one write over the closing bracket that ends in a new one: what a kill leaves
    is whole, or breaks off within the last write. The process is the rank, each track a thread of
    it, with further threads (lanes) where spans overlap.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, rank: int = 0, clock_offset_ns: int = 0
    ) -> None:
        """Create the file; raise `ConfigError` if the folder cannot be written.

        `clock_offset_ns` is what must be added to this host's wall clock to get rank 0's.
        """
        self.rank = rank
        self.path = Path(folder) / trace_name(rank)
        # Viewers know a thread by its id alone, so no two ranks share one.
        self._first_tid = (rank + 1) * TIDS_PER_RANK
        self._pending: deque[_Span | tuple[int, int]] = deque()
        self._room = MOST_PENDING
        self._dropped = 0
        #: by track, when each of its lanes is free
        self._lanes: dict[str, list[int]] = {}
        self._owner_pid = os.getpid()
        self._write_lock = Lock()
        before_ns = time.perf_counter_ns()
        wall_ns = time.time_ns()
        self._origin_ns = (before_ns + time.perf_counter_ns()) // 2
        facts: dict[str, dict[str, Any]] = {
            ANCHOR: {"wall_ns": wall_ns, "clock_offset_ns": clock_offset_ns, "rank": rank},
            "process_name": {"name": f"rank {rank}"},
            "process_labels": {"labels": socket.gethostname()},
            "process_sort_index": {"sort_index": rank},
        }
        where = "M", rank, self._first_tid
        first = ",\n".join(event_line(*where, name, args=args) for name, args in facts.items())
        head = f"[\n{first}".encode("ascii")
        self._used_bytes = len(head)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if _is_foreign(self.path):
                raise ConfigError(
                    f"timeline: {self.path} is there and is no trace of bytesched: "
                    "name another folder, or move the file"
                )
            with replacing(self.path) as file:
                file.write(head + _TAIL)
                self._file = os.fdopen(os.dup(file.fileno()), "r+b")
        except OSError as error:
            raise ConfigError(
                f"timeline: cannot write {self.path}: {error.strerror or error}; "
                "name a folder that this user may write on every host"
            ) from error

    def on_span(
        self, track: str, name: str, start_ns: int, end_ns: int, args: dict[str, Any] | None = None
    ) -> None:
        if len(self._pending) < self._room:
            self._pending.append(_Span(start_ns, end_ns, track, name, args))
        else:
            self._dropped += 1

    def on_step(self, step: int, at_ns: int) -> None:
        """Mark the step and write everything that has gathered."""
        self._pending.append((step, at_ns))
        self._flush()

    def close(self) -> None:
        """Write the rest and finish the file; later calls do nothing."""
        self._flush(last=True)

    def __repr__(self) -> str:
        return f"<Timeline {self.path}, {len(self._pending)} pending, {self._dropped} dropped>"

    def _flush(self, *, last: bool = False) -> None:
        # A forked child shares the file; only the process that opened it may write.
        if os.getpid() != self._owner_pid:
            return
        with self._write_lock:
            if not self._room:
                self._pending.clear()
                return
            try:
                batch = "".join(f",\n{record}" for record in self._records(last=last))
                if self._used_bytes + len(batch) + len(_TAIL) > MOST_BYTES:
                    log.warning("timeline: %s is full; tracing ends here", self.path)
                else:
                    data = batch.encode("ascii") + _TAIL
                    if os.pwrite(self._file.fileno(), data, self._used_bytes) < len(data):
                        raise OSError(ENOSPC, os.strerror(ENOSPC))
                    self._used_bytes += len(batch)
                    if not last:
                        return
            except OSError as error:
                log.warning("timeline: cannot write %s (%s); tracing ends here", self.path, error)
            self._room = 0
            self._pending.clear()
            self._file.close()

    def _records(self, *, last: bool) -> list[str]:
        """Take what has gathered and return it as JSON."""
        spans: list[_Span] = []
        records: list[str] = []
        for _ in range(len(self._pending)):
            event = self._pending.popleft()
            if isinstance(event, _Span):
                spans.append(event)
            else:
                step, at_ns = event
                records.append(self._mark(f"step {step}", at_ns, {"step": step}))
        if last and self._dropped:
            at_ns = time.perf_counter_ns()
            records.append(self._mark("dropped events", at_ns, {"count": self._dropped}))
        for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)):
            records += self._slice(span)
        return records

    def _slice(self, span: _Span) -> list[str]:
        """The slice of a span, in the first free lane of its track, which may be new."""
        # A viewer draws the slices of one thread as a stack, so those of a lane are apart.
        lanes = self._lanes.setdefault(span.track, [])
        end_ns = max(span.end_ns, span.start_ns + 1)
        lane = next((n for n, free_ns in enumerate(lanes) if free_ns <= span.start_ns), len(lanes))
        order = [*TRACKS, *self._lanes].index(span.track)
        in_rank = order * LANES_PER_TRACK + min(lane, LANES_PER_TRACK - 1)
        tid = self._first_tid + in_rank
        records: list[str] = []
        if lane == len(lanes):
            lanes.append(end_ns)
            name = span.track if lane == 0 else f"{span.track} {lane + 1}"
            for kind, value in (("name", name), ("sort_index", in_rank)):
                records.append(
                    event_line("M", self.rank, tid, f"thread_{kind}", args={kind: value})
                )
        lanes[lane] = end_ns
        where = (self.rank, tid, span.name, span.start_ns - self._origin_ns)
        took_us = (end_ns - span.start_ns) / 1000
        records.append(event_line("X", *where, args=span.args or {}, cat=span.track, dur=took_us))
        return records

    def _mark(self, name: str, at_ns: int, args: dict[str, int]) -> str:
        where = (self.rank, self._first_tid, name, at_ns - self._origin_ns)
        return event_line("i", *where, args=args, cat="mark", s="p")


def _is_foreign(path: Path) -> bool:
    """Whether a file with some content lies there that no `Timeline` wrote."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    return bool(head) and ANCHOR.encode() not in head
