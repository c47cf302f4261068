"""The server's side of the store over MPI: its keys, and the workers that use them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any, NamedTuple

import torch

from bytesched.errors import (
    BytesschedError,
    InvalidTransition,
    PeerLost,
    PluginError,
    SchedulerTimeout,
)

from .entry import Entry, Meetings, Pull, ServerOptimizer, Spare
from .loop import Loop
from .messages import (
    TO_WORKER,
    Message,
    Op,
    memory_of,
    packed_state,
    pull_tag,
    push_tag,
    unpacked_state,
)
from .transfer import Answers, Transfer

#: Values that are being received at a time, from all workers.
_RECEIVING = 4


class _Push(NamedTuple):
    """A worker has announced a value, and is offering it."""

    worker: int
    entry: Entry
    message: Message


class Server:
    """Serves the keys of one rank (see loop.Role); a step is complete within ``timeout_s``."""

    def __init__(
        self, loop: Loop, transfer: Transfer, workers: list[int], timeout_s: float
    ) -> None:
        self.error: BaseException | None = None
        #: some worker has not left, and nothing has failed
        self.is_serving = True
        #: ranks of the communicator, by number of the worker
        self._workers = workers
        self._number = {rank: number for number, rank in enumerate(workers)}
        self._timeout_s = timeout_s
        self._loop = loop
        self._transfer = transfer
        self._spare = Spare()
        self._announced: list[_Push] = []
        self._receiving = 0
        #: by number of the worker
        self._answers = [Answers(rank, transfer) for rank in workers]
        self._entries: dict[int, Entry] = {}
        self._optimizer: dict[str, Any] | None = None
        self._hyperparameters: dict[str, Any] = {}
        self._seen_s = [monotonic()] * len(workers)
        self._left: set[int] = set()
        self._meetings = Meetings(len(workers), self._left)
        #: called when every worker has left
        self.on_empty: Callable[[], None] = lambda: None
        self._by_op: dict[int, Callable[[int, Message], None]] = {
            Op.MEET: self._meet,
            Op.INIT: self._init,
            Op.DELETE: self._delete,
            Op.PUSH: self._push,
            Op.PULL: self._pull,
            Op.OPTIMIZER: self._set_optimizer,
            Op.GET_STATE: self._get_state,
            Op.SET_STATE: self._set_state,
            Op.ALIVE: lambda worker, message: None,
            Op.BYE: self._bye,
        }

    def on_message(self, rank: int, message: Message) -> None:
        if message.op == Op.FAILED:
            self.fail(message.error)
        if self.error is not None or rank not in self._number:
            return
        worker = self._number[rank]
        self._seen_s[worker] = monotonic()
        try:
            self._by_op[message.op](worker, message)
        except BytesschedError as error:
            self.fail(error)

    def on_tick(self) -> None:
        """Looks for what has waited too long."""
        if self.error is not None:
            return
        now_s = monotonic()
        oldest_s = now_s - self._timeout_s
        where_workers_wait: list[Entry | Meetings] = [*self._entries.values(), self._meetings]
        for place in where_workers_wait:
            if missing := place.overdue(oldest_s):
                self.fail(SchedulerTimeout(f"waited {self._timeout_s:g} s for {missing}"))
                return
        for worker, seen_s in enumerate(self._seen_s):
            if worker not in self._left and seen_s < oldest_s:
                self.fail(PeerLost(f"nothing came from worker {worker} for {self._timeout_s:g} s"))
                return

    def awaits(self) -> bool:
        # A server only answers.
        return False

    def fail(self, error: BaseException) -> None:
        """The first error is final, and is sent to every worker."""
        if self.error is not None:
            return
        self.error = error
        message = Message.failed(error)
        for worker, rank in enumerate(self._workers):
            if worker not in self._left:
                self._loop.send_message(rank, TO_WORKER, message)
        self._end()

    # -- what workers agree on ---------------------------------------------------------

    def _meet(self, worker: int, message: Message) -> None:
        different = self._meetings.come(message.step, worker, message.body)
        if different is None:
            return
        for rank in self._workers:
            self._loop.send_message(
                rank, TO_WORKER, Message(Op.MET, step=message.step, body=different)
            )

    def _bye(self, worker: int, message: Message) -> None:
        self._left.add(worker)
        for entry in self._entries.values():
            entry.check(self._left)
        self._meetings.check()
        if len(self._left) == len(self._workers):
            self._end()

    def _end(self) -> None:
        self.is_serving = False
        self.on_empty()

    # -- keys --------------------------------------------------------------------------

    def _init(self, worker: int, message: Message) -> None:
        what = message.body
        value = torch.empty(what["shape"], dtype=getattr(torch, what["dtype"]))
        entry = Entry(
            message.key,
            what["name"],
            value.reshape(-1),
            what["shape"],
            workers=len(self._workers),
            spare=self._spare,
        )

        def arrived() -> None:
            # What has no gradient, such as a count, is summed.
            if self._optimizer is not None and value.is_floating_point():
                entry.optimizer = ServerOptimizer(
                    self._optimizer["name"], value, self._optimizer["hyperparameters"]
                )
                entry.average = self._optimizer["average"]
            self._entries[entry.number] = entry
            self._done(worker, message)

        self._loop.receive(
            memory_of(entry.value), self._workers[worker], push_tag(entry.number), arrived
        )

    def _delete(self, worker: int, message: Message) -> None:
        # All workers have met: nothing of it is under way.
        if (entry := self._entries.pop(message.key, None)) is not None:
            self._spare.drop(entry.value)
        self._transfer.forget(message.key)
        self._done(worker, message)

    def _set_optimizer(self, worker: int, message: Message) -> None:
        what = message.body
        if "name" in what:
            if self._optimizer is not None:
                raise InvalidTransition(f"the store has an optimizer: {self._optimizer['name']}")
            # Refused now, and not in the middle of the first step.
            ServerOptimizer(what["name"], torch.zeros(1), what["hyperparameters"])
            self._optimizer = what
        self._hyperparameters = what["hyperparameters"]
        self._done(worker, message)

    def _done(self, worker: int, message: Message) -> None:
        answer = Message(Op.DONE, step=message.step)
        self._loop.send_message(self._workers[worker], TO_WORKER, answer)

    def _known(self, message: Message, worker: int) -> Entry:
        entry = self._entries.get(message.key)
        if entry is None:
            raise InvalidTransition(f"worker {worker} used key {message.key}, which is not here")
        return entry

    # -- pushes and pulls --------------------------------------------------------------

    def _push(self, worker: int, message: Message) -> None:
        entry = self._known(message, worker)
        entry.announce(worker, message)
        self._announced.append(_Push(worker, entry, message))
        self._receive_next()

    def _receive_next(self) -> None:
        """Most complete first: what is nearly summed lets all workers go on (BytePS)."""
        while self._announced and self._receiving < _RECEIVING:
            # Of several, the one that was announced first.
            push = min(self._announced, key=lambda p: (-p.entry.taken, -p.message.priority))
            self._announced.remove(push)
            self._receiving += 1
            worker, entry, message = push
            entry.announced -= 1
            entry.taken += 1
            buffer = self._spare.take(entry.value)
            received = partial(self._received, push, buffer)
            self._transfer.take(self._workers[worker], message, memory_of(buffer), received)

    def _received(self, push: _Push, value: torch.Tensor) -> None:
        self._receiving -= 1
        entry, message = push.entry, push.message
        self._loop.send_message(
            self._workers[push.worker],
            TO_WORKER,
            Message(Op.PUSHED, entry.number, message.step, offset=message.offset),
        )
        entry.receive(push.worker, value)
        self._answer(entry)
        self._receive_next()

    def _pull(self, worker: int, message: Message) -> None:
        entry = self._known(message, worker)
        entry.ask(Pull(worker, message.step, message.priority), self._hyperparameters)
        self._answer(entry)

    def _answer(self, entry: Entry) -> None:
        """Sends the value to everyone whose turn it is."""
        for pull in entry.answerable(self._left):
            # It stays what it is while it is sent: a sum is replaced when all workers have it.
            self._answers[pull.worker].add(entry.number, pull.priority, memory_of(entry.value))

    # -- state -------------------------------------------------------------------------

    def _get_state(self, worker: int, message: Message) -> None:
        entry = self._known(message, worker)
        state = {"value": entry.value.clone()}
        if entry.optimizer is not None:
            state.update(entry.optimizer.state)
        rank, data = self._workers[worker], packed_state(state)
        self._loop.send(data, rank, pull_tag(entry.number))

    def _set_state(self, worker: int, message: Message) -> None:
        entry = self._known(message, worker)
        data = bytearray(message.nbytes)

        def arrived() -> None:
            state = unpacked_state(data)
            entry.value.copy_(state.pop("value").reshape(-1))
            if state:
                if entry.optimizer is None:
                    raise PluginError(f"key {entry.name!r} has no optimizer to take {list(state)}")
                entry.optimizer.load(state)
            self._done(worker, message)

        self._loop.receive(data, self._workers[worker], push_tag(entry.number), arrived)
