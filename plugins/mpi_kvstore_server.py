"""The server's side of the store over MPI: sums, updates, and who waits for what."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any

import torch

from bytesched import errors
from bytesched.errors import (
    BytesschedError,
    InvalidTransition,
    MismatchError,
    PeerLost,
    PluginError,
    SchedulerTimeout,
)
from bytesched.plugins.kvstore_optimizer import ServerOptimizer, packed_state, unpacked_state
from bytesched.plugins.mpi_kvstore_loop import TO_WORKER, Loop, Message, Op, pull_tag, push_tag
from bytesched.plugins.mpi_kvstore_service import Answers
from bytesched.plugins.mpi_kvstore_transfer import Transfer

__all__ = ["Server", "error_of", "memory_of"]

#: Values that are being received at a time; those that wait are chosen by how complete they are.
_RECEIVING = 4


@dataclass(eq=False)
class _Entry:
    """One key."""

    number: int
    name: str
    value: torch.Tensor
    shape: list[int]
    optimizer: ServerOptimizer | None = None
    #: how often each worker has pushed it
    counts: list[int] = field(default_factory=list)
    #: how many steps are complete
    completed: int = 0
    #: this step's sum so far, and the worker whose value is added next
    total: torch.Tensor | None = None
    next_worker: int = 0
    #: received values of workers that come later in the sum
    arrived: dict[int, torch.Tensor] = field(default_factory=dict)
    #: values of this step that were received or are on their way
    taken: int = 0
    #: hyper-parameters of this step: those that hold when worker 0 pulls, which is in step()
    hyperparameters: dict[str, Any] | None = None
    #: (worker, its count, priority) of pulls that wait
    pulls: list[tuple[int, int, int]] = field(default_factory=list)
    #: when the oldest push of this step, or the oldest pull that waits, has come
    since_s: float = 0.0


@dataclass(eq=False)
class _Push:
    worker: int
    entry: _Entry
    message: Message
    sequence: int


class Server:
    """Serves the keys of one rank. Everything runs in the loop's thread.

    Args:
        workers: ranks of the communicator, by number of the worker.
        staleness: None if a pull waits for all pushes of its step; else by how many steps a
            worker may be ahead of the slowest.
        timeout_s: how long a step may stay incomplete.
    """

    def __init__(self, workers: list[int], *, staleness: int | None, timeout_s: float) -> None:
        self.error: BaseException | None = None
        #: some worker has not left, and nothing has failed
        self.is_serving = True
        self._workers = workers
        self._number = {rank: number for number, rank in enumerate(workers)}
        self._staleness = staleness
        self._timeout_s = timeout_s
        self._loop: Loop
        self._transfer: Transfer
        #: by number of the worker
        self._answers: list[Answers] = []
        self._entries: dict[int, _Entry] = {}
        self._announced: list[_Push] = []
        self._receiving = 0
        self._pushes = 0
        self._spare: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        self._meetings: dict[int, dict[int, str]] = {}
        self._met_since_s: dict[int, float] = {}
        self._optimizer: dict[str, Any] | None = None
        self._average = False
        self._hyperparameters: dict[str, Any] = {}
        self._heard_s = [monotonic()] * len(workers)
        self._left: set[int] = set()
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

    def serve(self, loop: Loop, transfer: Transfer) -> None:
        """What to answer through."""
        self._loop = loop
        self._transfer = transfer
        self._answers = [Answers(rank, transfer) for rank in self._workers]

    def on_message(self, rank: int, message: Message) -> None:
        """A worker, or another server, says something."""
        if message.op == Op.FAILED:
            self.fail(error_of(message))
        if self.error is not None or rank not in self._number:
            return
        worker = self._number[rank]
        self._heard_s[worker] = monotonic()
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
        for entry in self._entries.values():
            if entry.since_s and entry.since_s < oldest_s:
                slowest = min(entry.counts)
                missing = [w for w, count in enumerate(entry.counts) if count == slowest]
                self.fail(
                    SchedulerTimeout(
                        f"waited {self._timeout_s:g} s for worker {_listed(missing)} to push key "
                        f"{entry.name!r} (step {slowest + 1}): stopped, stuck, or in other code"
                    )
                )
                return
        for number, since_s in self._met_since_s.items():
            if since_s < oldest_s:
                here = self._meetings[number]
                absent = [w for w in range(len(self._workers)) if w not in here]
                self.fail(
                    SchedulerTimeout(
                        f"waited {self._timeout_s:g} s for worker {_listed(absent)} at: "
                        f"{next(iter(here.values()))}"
                    )
                )
                return
        for worker, heard_s in enumerate(self._heard_s):
            if worker not in self._left and heard_s < oldest_s:
                self.fail(
                    PeerLost(f"nothing was heard of worker {worker} for {self._timeout_s:g} s")
                )
                return

    def fail(self, error: BaseException) -> None:
        """The first error is final, and every worker is told."""
        if self.error is not None:
            return
        self.error = error
        message = Message(Op.FAILED, text=f"{type(error).__name__}\n{error}")
        for worker, rank in enumerate(self._workers):
            if worker not in self._left:
                self._loop.tell(rank, TO_WORKER, message)
        self._end()

    # -- what workers agree on ---------------------------------------------------------

    def _meet(self, worker: int, message: Message) -> None:
        meeting = self._meetings.setdefault(message.step, {})
        self._met_since_s.setdefault(message.step, monotonic())
        meeting[worker] = message.text
        if absent := self._left - meeting.keys():
            raise PeerLost(f"worker {_listed(sorted(absent))} left; others are at: {message.text}")
        if len(meeting) < len(self._workers):
            return
        del self._meetings[message.step], self._met_since_s[message.step]
        different = next((w for w in sorted(meeting) if meeting[w] != meeting[0]), None)
        text = ""
        if different is not None:
            text = (
                f"worker 0 called {meeting[0]}, and worker {different} called {meeting[different]}"
            )
        for rank in self._workers:
            self._loop.tell(rank, TO_WORKER, Message(Op.MET, step=message.step, text=text))

    def _bye(self, worker: int, message: Message) -> None:
        self._left.add(worker)
        for entry in self._entries.values():
            self._complain_of_left(entry)
        for meeting in self._meetings.values():
            if worker not in meeting:
                raise PeerLost(
                    f"worker {worker} left; others are at: {next(iter(meeting.values()))}"
                )
        if len(self._left) == len(self._workers):
            self._end()

    def _end(self) -> None:
        self.is_serving = False
        self.on_empty()

    # -- keys --------------------------------------------------------------------------

    def _init(self, worker: int, message: Message) -> None:
        what = json.loads(message.text)
        value = torch.empty(what["shape"], dtype=getattr(torch, what["dtype"]))
        entry = _Entry(message.key, what["name"], value.reshape(-1), what["shape"])
        entry.counts = [0] * len(self._workers)

        def arrived() -> None:
            # What has no gradient, such as a count, is summed.
            if self._optimizer is not None and value.is_floating_point():
                entry.optimizer = ServerOptimizer(
                    self._optimizer["name"], value, self._optimizer["hyperparameters"]
                )
            self._entries[entry.number] = entry
            self._done(worker, message)

        self._loop.receive(
            memory_of(entry.value), self._workers[worker], push_tag(entry.number), arrived
        )

    def _delete(self, worker: int, message: Message) -> None:
        self._entries.pop(message.key, None)
        self._done(worker, message)

    def _set_optimizer(self, worker: int, message: Message) -> None:
        what = json.loads(message.text)
        if "name" in what:
            if self._optimizer is not None:
                raise InvalidTransition(f"the store has an optimizer: {self._optimizer['name']}")
            # Refused now, and not in the middle of the first step.
            ServerOptimizer(what["name"], torch.zeros(1), what["hyperparameters"])
            self._optimizer = what
            self._average = bool(what["average"])
        self._hyperparameters = what["hyperparameters"]
        self._done(worker, message)

    def _done(self, worker: int, message: Message) -> None:
        answer = Message(Op.DONE, step=message.step)
        self._loop.tell(self._workers[worker], TO_WORKER, answer)

    def _known(self, message: Message, worker: int) -> _Entry:
        entry = self._entries.get(message.key)
        if entry is None:
            raise InvalidTransition(f"worker {worker} used key {message.key}, which is not here")
        return entry

    # -- pushes ------------------------------------------------------------------------

    def _push(self, worker: int, message: Message) -> None:
        entry = self._known(message, worker)
        if message.nbytes != entry.value.nbytes:
            raise MismatchError(
                f"worker {worker} pushed {message.nbytes} bytes of key {entry.name!r}, which has "
                f"{entry.value.nbytes}"
            )
        if message.step != entry.counts[worker] + 1:
            raise InvalidTransition(
                f"worker {worker} pushed step {message.step} of key {entry.name!r} after step "
                f"{entry.counts[worker]}"
            )
        entry.counts[worker] += 1
        self._pushes += 1
        self._announced.append(_Push(worker, entry, message, self._pushes))
        self._note_wait(entry)
        self._receive_next()

    def _receive_next(self) -> None:
        """Most complete first: what is nearly summed lets all workers go on (BytePS)."""
        while self._announced and self._receiving < _RECEIVING:
            push = min(
                self._announced,
                key=lambda p: (-p.entry.taken, -p.message.priority, p.sequence),
            )
            self._announced.remove(push)
            self._receiving += 1
            push.entry.taken += 1
            buffer = self._buffer(push.entry.value)
            self._transfer.take(
                self._workers[push.worker],
                push.message,
                memory_of(buffer),
                partial(self._received, push, buffer),
            )

    def _received(self, push: _Push, buffer: torch.Tensor) -> None:
        self._receiving -= 1
        entry = push.entry
        self._loop.tell(
            self._workers[push.worker],
            TO_WORKER,
            Message(Op.PUSHED, entry.number, push.message.step, offset=push.message.offset),
        )
        if self._staleness is not None:
            entry.taken -= 1
            self._apply(entry, buffer)
            self._keep(buffer)
        else:
            entry.arrived[push.worker] = buffer
            # In the order of the workers, so that the sum is the same in every run.
            while (value := entry.arrived.pop(entry.next_worker, None)) is not None:
                entry.next_worker += 1
                if entry.total is None:
                    entry.total = value
                else:
                    entry.total += value
                    self._keep(value)
            self._complete(entry)
        self._answer(entry)
        self._receive_next()

    def _complete(self, entry: _Entry) -> None:
        """Ends the step of a key, if all workers have pushed, and worker 0 has said how."""
        if entry.total is None or entry.next_worker < len(self._workers):
            return
        if entry.optimizer is not None and entry.hyperparameters is None:
            return
        total, entry.total = entry.total, None
        entry.next_worker = entry.taken = 0
        entry.completed += 1
        if entry.optimizer is None:
            total, entry.value = entry.value, total
        else:
            if self._average:
                total /= len(self._workers)
            entry.optimizer.update(total.reshape(entry.shape), entry.hyperparameters or {})
            entry.hyperparameters = None
        self._keep(total)

    def _apply(self, entry: _Entry, pushed: torch.Tensor) -> None:
        """At once, in an asynchronous store."""
        if entry.optimizer is None:
            entry.value += pushed
        else:
            entry.optimizer.update(pushed.reshape(entry.shape), self._hyperparameters)

    # -- pulls -------------------------------------------------------------------------

    def _pull(self, worker: int, message: Message) -> None:
        entry = self._known(message, worker)
        entry.pulls.append((worker, message.step, message.priority))
        if worker == 0 and message.step > entry.completed:
            entry.hyperparameters = self._hyperparameters
            self._complete(entry)
        self._answer(entry)

    def _answer(self, entry: _Entry) -> None:
        """Sends the value to everyone whose turn it is."""
        waiting = []
        for worker, count, priority in entry.pulls:
            if self._staleness is None:
                is_ready = entry.completed >= count
            else:
                slowest = min(c for w, c in enumerate(entry.counts) if w not in self._left)
                is_ready = count - slowest <= self._staleness
            if is_ready:
                # In an asynchronous store the next push may come while this is on its way.
                is_shared = self._staleness is None
                value = entry.value if is_shared else self._copy(entry.value)
                self._answers[worker].add(
                    entry.number,
                    priority,
                    memory_of(value),
                    (lambda: None) if is_shared else partial(self._keep, value),
                )
            else:
                waiting.append((worker, count, priority))
        entry.pulls = waiting
        self._note_wait(entry)
        self._complain_of_left(entry)

    def _complain_of_left(self, entry: _Entry) -> None:
        """Raises PeerLost if a pull waits for a worker that has left."""
        for worker, count, _ in entry.pulls:
            for other in self._left:
                if self._staleness is None and entry.counts[other] < count:
                    raise PeerLost(
                        f"worker {other} left before step {count} of key {entry.name!r}, for "
                        f"which worker {worker} waits"
                    )

    def _note_wait(self, entry: _Entry) -> None:
        waits = bool(entry.pulls) or (self._staleness is None and entry.taken > 0)
        waits = waits or any(push.entry is entry for push in self._announced)
        entry.since_s = (entry.since_s or monotonic()) if waits else 0.0

    # -- state -------------------------------------------------------------------------

    def _get_state(self, worker: int, message: Message) -> None:
        entry = self._known(message, worker)
        state = {"value": entry.value.clone()}
        if entry.optimizer is not None:
            state.update(entry.optimizer.state)
        what, data = packed_state(state)
        rank = self._workers[worker]
        text = json.dumps(what)
        self._loop.tell(
            rank,
            TO_WORKER,
            Message(Op.STATE, entry.number, message.step, nbytes=data.nbytes, text=text),
        )
        self._loop.send(memory_of(data), rank, pull_tag(entry.number), lambda: None)

    def _set_state(self, worker: int, message: Message) -> None:
        entry = self._known(message, worker)
        what = json.loads(message.text)
        data = torch.empty(message.nbytes, dtype=torch.uint8)

        def arrived() -> None:
            state = unpacked_state(what, data)
            entry.value.copy_(state.pop("value").reshape(-1))
            if state:
                if entry.optimizer is None:
                    raise PluginError(f"key {entry.name!r} has no optimizer to take {list(state)}")
                entry.optimizer.load(state)
            self._done(worker, message)

        self._loop.receive(memory_of(data), self._workers[worker], push_tag(entry.number), arrived)

    # -- memory ------------------------------------------------------------------------

    def _buffer(self, like: torch.Tensor) -> torch.Tensor:
        spare = self._spare.setdefault((like.numel(), like.dtype), [])
        return spare.pop() if spare else torch.empty_like(like)

    def _copy(self, value: torch.Tensor) -> torch.Tensor:
        return self._buffer(value).copy_(value)

    def _keep(self, buffer: torch.Tensor) -> None:
        self._spare[buffer.numel(), buffer.dtype].append(buffer)


def memory_of(tensor: torch.Tensor) -> Any:
    """The bytes of a flat tensor, as MPI takes them."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _listed(workers: list[int]) -> str:
    return ", ".join(map(str, workers))


def error_of(message: Message) -> BaseException:
    """The error that another rank has reported."""
    name, _, text = message.text.partition("\n")
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, errors.BytesschedError):
        return kind(text)
    return PeerLost(f"{name}: {text}")
