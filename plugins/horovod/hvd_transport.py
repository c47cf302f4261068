"""Chunks through Horovod: started at once, their ends looked for without spinning."""

from __future__ import annotations

import threading
import time
from queue import Empty, SimpleQueue
from typing import Final

from bytesched.errors import SchedulerClosed
from bytesched.task import CommTask
from bytesched.transport import Done

from ..layout.packing import Packer
from ..proxies.spans import span
from ..routes.streams import Streams
from .wire import Wire

__all__ = ["HorovodTransport"]

#: Horovod has no event for the end of an operation. Looking for it so often, compared with how
#: often one ends, costs the wire little and the cores less.
_LOOKS: Final = 8
_SHORTEST_S: Final = 1e-4
_LONGEST_S: Final = 1e-3
#: weight of the latest gap between two ends
_LATEST: Final = 0.2


class HorovodTransport:
    """Packs a chunk, all-reduces it, and reports when it is complete (see transport.Transport)."""

    def __init__(self, wire: Wire, packer: Packer, streams: Streams) -> None:
        self._wire = wire
        self._packer = packer
        self._streams = streams
        self._sent: SimpleQueue[tuple[CommTask, int, Done] | None] = SimpleQueue()
        self._under_way: list[tuple[CommTask, int, Done]] = []
        self._gap_s = _LOOKS * _SHORTEST_S
        self._ended_s = 0.0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="bytesched-poller", daemon=True)
        self._thread.start()

    def start(self, task: CommTask, done: Done) -> None:
        if self._closed:
            raise SchedulerClosed(f"{task.name} was started after close")
        with self._streams.communication(task), span("bytesched::send"):
            packed = self._packer.pack(task)
            try:
                handle = self._wire.reduce(task, packed)
            except (RuntimeError, ValueError) as error:
                raise self._wire.error(error, task=task.name) from error
        self._sent.put((task, handle, done))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._sent.put(None)
            self._thread.join(5.0)

    def _run(self) -> None:
        """The poller's thread."""
        while self._take():
            ended = [sent for sent in self._under_way if self._wire.is_done(sent[1])]
            if not ended:
                time.sleep(min(max(self._gap_s / _LOOKS, _SHORTEST_S), _LONGEST_S))
                continue
            self._note_gap(len(ended))
            self._under_way = [sent for sent in self._under_way if sent not in ended]
            for sent in ended:
                self._end(*sent)
        for task, _, done in self._under_way:
            done(task, SchedulerClosed(f"closed while {task.name} was being sent"))

    def _take(self) -> bool:
        """Adds what was started; waits if nothing is under way. False at the end."""
        wait = not self._under_way
        while True:
            try:
                sent = self._sent.get(block=wait)
            except Empty:
                return True
            if sent is None:
                return False
            if wait:
                self._ended_s = time.monotonic()
            wait = False
            self._under_way.append(sent)

    def _note_gap(self, ended: int) -> None:
        now_s = time.monotonic()
        self._gap_s += _LATEST * ((now_s - self._ended_s) / ended - self._gap_s)
        self._ended_s = now_s

    def _end(self, task: CommTask, handle: int, done: Done) -> None:
        failed: BaseException | None = None
        try:
            with self._streams.completion(task):
                self._wire.result(handle, task=task.name)
                self._packer.receive(task)
            self._packer.let_go(task)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is waited for
            failed = error
        done(task, failed)

    def __repr__(self) -> str:
        return (
            f"<HorovodTransport rank {self._wire.rank} of {self._wire.size}, "
            f"{len(self._under_way)} under way>"
        )
