"""Ranks of this process whose operations meet in memory: no connection, and no thread."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from typing import Any, NamedTuple

import torch
from fake_gloo import FakeGloo, FakeWork, fake_group

from bytesched.plugins.routes.groups.group import Group

#: by which Group looks at connections, and breaks them
_NEVER_SENT = 1 << 20


class _Come(NamedTuple):
    """What one rank brings to a collective: what it changes, and what it gives."""

    kind: str
    row: torch.Tensor
    given: torch.Tensor
    work: FakeWork


class Meeting:
    """So many ranks: a collective ends when the last of them has begun it, a message when it is
    received.
    """

    def __init__(self, ranks: int) -> None:
        self.gloos = [_MetGloo(self, rank, ranks) for rank in range(ranks)]
        self.groups: list[Group] = [fake_group(gloo) for gloo in self.gloos]
        self._lock = threading.Lock()
        self._come: list[deque[_Come]] = [deque() for _ in range(ranks)]
        #: by sender and receiver: what was sent, and where it is waited for
        self._sent: defaultdict[tuple[int, int], deque[torch.Tensor]] = defaultdict(deque)
        self._wanted: defaultdict[tuple[int, int], deque[tuple[torch.Tensor, FakeWork]]] = (
            defaultdict(deque)
        )

    def come(self, rank: int, come: _Come) -> FakeWork:
        with self._lock:
            self._come[rank].append(come)
            met = [each.popleft() for each in self._come] if all(self._come) else []
        if met:
            assert len({(one.kind, one.row.shape, one.row.dtype) for one in met}) == 1, met
            if come.kind == "sum":
                whole = met[0].given.clone()
                for one in met[1:]:
                    whole += one.given
            else:
                whole = torch.cat([one.given for one in met])
            for one in met:
                one.row.copy_(whole)
        for one in met:
            one.work.end()
        return come.work

    def send(self, way: tuple[int, int], tensor: torch.Tensor) -> None:
        with self._lock:
            self._sent[way].append(tensor.clone())
        self._deliver(way)

    def receive(self, way: tuple[int, int], tensor: torch.Tensor, work: FakeWork) -> None:
        with self._lock:
            self._wanted[way].append((tensor, work))
        self._deliver(way)

    def _deliver(self, way: tuple[int, int]) -> None:
        with self._lock:
            while self._sent[way] and self._wanted[way]:
                tensor, work = self._wanted[way].popleft()
                tensor.copy_(self._sent[way].popleft())
                work.end()


class _MetGloo(FakeGloo):
    """One rank's backend."""

    def __init__(self, meeting: Meeting, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._meeting = meeting

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> FakeWork:
        return self._come("sum", tensors[0], tensors[0])

    def _allgather_base(self, row: torch.Tensor, part: torch.Tensor) -> FakeWork:
        return self._come("spread", row, part)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> FakeWork:
        work = super().send(tensors, peer, tag)
        self._meeting.send((self._rank, peer), tensors[0])
        work.end()
        return work

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        work = super().recv(tensors, peer, tag)
        if tag != _NEVER_SENT:
            self._meeting.receive((peer, self._rank), tensors[0], work)
        return work

    def _come(self, kind: str, row: torch.Tensor, given: torch.Tensor) -> FakeWork:
        work = self._begin(kind, row, -1)
        return self._meeting.come(self._rank, _Come(kind, row, given, work))
