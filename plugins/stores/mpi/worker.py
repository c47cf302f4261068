"""The worker's side of the store over MPI."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import torch

from bytesched.errors import InvalidTransition
from bytesched.kvstore.protocol import Ended, Key, describe, known

from .calls import Calls
from .loop import Loop
from .messages import (
    TO_SERVER,
    TO_WORKER,
    Message,
    Op,
    flat_of,
    memory_of,
    packed_state,
    pull_tag,
    tensor_of,
    unpacked_state,
)
from .server import Server
from .transfer import Transfer


@dataclass(eq=False)
class _Remote:
    """A key, and on which server it is."""

    key: Key
    number: int
    server: int
    what: str
    nbytes: int
    #: pushes of this worker
    count: int = 0
    #: pushed, and not pulled since
    is_pushed: bool = False
    _lock: Lock = field(default_factory=Lock)

    def begin_push(self, worker: int) -> int:
        """The number of this push of ``worker``, from 1; InvalidTransition for two in one step."""
        with self._lock:
            if self.is_pushed:
                raise InvalidTransition(
                    f"worker {worker} pushed key {self.key!r} twice in one step: pull it first"
                )
            self.is_pushed = True
            self.count += 1
            return self.count


class MPIKVStore:
    """One worker's view of the store; see `open_store`, which makes it.

    Transfers are carried out by a thread of its own, which alone calls MPI.
    """

    #: see `AsyncKVStore`
    answers_by_priority = True

    def __init__(
        self,
        loop: Loop,
        transfer: Transfer,
        server: Server | None,
        *,
        num_workers: int,
        servers: list[int],
        timeout_s: float,
        updates: bool,
    ) -> None:
        #: bytesched.wrap gives the optimizer to this store
        self.updates = updates
        self._num_workers = num_workers
        self._servers = servers
        #: All workers make the same calls, and so put each key on the same server.
        self._keys: dict[Key, _Remote] = {}
        self._made = 0
        self._load_bytes = dict.fromkeys(servers, 0)
        self._has_optimizer = False
        self._loop = loop
        self._transfer = transfer
        self._server = server
        self._calls = Calls(loop, transfer, servers, timeout_s)
        loop.add(self._calls, TO_WORKER)

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""
        return self._loop.rank

    @property
    def num_workers(self) -> int:
        """How many workers push to this store."""
        return self._num_workers

    @property
    def num_servers(self) -> int:
        """Over how many ranks keys are spread."""
        return len(self._servers)

    @property
    def is_stateful(self) -> bool:
        """True if the store has an optimizer: keys must stay what they are."""
        return self._has_optimizer

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._calls.is_closed

    @property
    def error(self) -> BaseException | None:
        """The first error, which is final."""
        return self._calls.error

    # -- the calls of a store ----------------------------------------------------------

    def init(self, key: Key, value: Any) -> None:
        """Makes ``key``, with the value of worker 0, on the server that holds the fewest bytes."""
        self._calls.check(f"init of key {key!r}")
        if key in self._keys:
            raise InvalidTransition(f"key {key!r} has been initialised already")
        self._calls.meet(f"init {key!r} as {describe(value)}")
        flat = flat_of(value)
        server = min(self._load_bytes, key=lambda rank: (self._load_bytes[rank], rank))
        self._load_bytes[server] += flat.nbytes
        remote = _Remote(key, self._made, server, describe(value), flat.nbytes)
        self._made += 1
        if self.rank == 0:
            dtype = str(value.dtype).removeprefix("torch.")
            what = {"name": str(key), "dtype": dtype, "shape": list(value.shape)}
            call = f"init of key {key!r}"
            self._calls.ask(Op.INIT, server, call, remote.number, what, memory_of(flat))
        self._calls.meet(f"init {key!r}: done")
        self._keys[key] = remote

    def delete(self, key: Key) -> None:
        """Forgets ``key``; every worker calls it."""
        remote = self._known(key, "delete")
        self._calls.meet(f"delete {key!r}")
        if self.rank == 0:
            self._calls.ask(Op.DELETE, remote.server, f"delete of key {key!r}", remote.number)
        self._loop.call(lambda: self._transfer.forget(remote.number))
        self._load_bytes[remote.server] -= remote.nbytes
        del self._keys[key]

    def push(self, key: Key, value: Any, priority: int = 0) -> None:
        """Adds ``value`` to this step of ``key``; returns when the server has it."""
        self._calls.wait(f"push of key {key!r}", self._push(key, value, priority))

    def pull(self, key: Key, out: Any, priority: int = 0) -> None:
        """Fills ``out`` with the value of ``key``."""
        self._calls.wait(f"pull of key {key!r}", self._pull(key, out, priority))

    def pushpull(self, key: Key, value: Any, out: Any = None, priority: int = 0) -> None:
        """Push, then pull into ``out``, or into ``value`` if that is None."""
        self.push(key, value, priority)
        self.pull(key, value if out is None else out, priority)

    def start_push(self, key: Key, value: Any, ended: Ended, priority: int = 0) -> None:
        """Begins a push; it has ended when the server has the value."""
        begin = self._push(key, value, priority)
        self._loop.call(lambda: begin(ended))

    def start_pull(self, key: Key, out: Any, ended: Ended, priority: int = 0) -> None:
        """Begins a pull; it has ended when ``out`` is filled."""
        begin = self._pull(key, out, priority)
        self._loop.call(lambda: begin(ended))

    def barrier(self) -> None:
        """Returns when every worker has called it."""
        self._calls.check("barrier")
        self._calls.meet("barrier")

    def close(self) -> None:
        """Leaves the store; waits for the other workers if this rank serves them. Idempotent."""
        self._calls.close(self._server)

    # -- more --------------------------------------------------------------------------

    def set_optimizer(self, name: str, *, average: bool = True, **hyperparameters: Any) -> None:
        """For keys that are made from now on, pushes are gradients and pulls are parameters.

        Every worker calls it, once.

        Args:
            name: of a class in torch.optim.
            average: whether the sum of a step is divided by the number of workers.
            hyperparameters: the keyword arguments of that class.
        """
        what = {"name": name, "average": average, "hyperparameters": hyperparameters}
        self._calls.meet(f"set_optimizer {json.dumps(what, sort_keys=True)}")
        self._has_optimizer = True
        if self.rank == 0:
            for server in self._servers:
                self._calls.ask(Op.OPTIMIZER, server, "set_optimizer", body=what)
        self._calls.meet("set_optimizer: done")

    def set_hyperparameters(self, **hyperparameters: Any) -> None:
        """Those of all steps that worker 0 pulls from now on; the others' calls do nothing."""
        self._calls.check("set_hyperparameters")
        if self.rank == 0:
            message = Message(Op.OPTIMIZER, step=-1, body={"hyperparameters": hyperparameters})
            # What JSON does not have is refused in this thread.
            message.packed(self.rank)
            self._loop.call(lambda: self._calls.send_to_all(message))

    def get_state(self, key: Key) -> dict[str, torch.Tensor]:
        """The value of ``key``, named "value", and the optimizer's state of it."""
        call = f"get_state of key {key!r}"
        remote = self._known(key, "get_state")
        number, data = remote.number, bytearray()

        def begin(ended: Ended) -> None:
            if self._calls.expect("state", number, call, remote.server, ended):
                self._loop.receive_checked(
                    data,
                    remote.server,
                    pull_tag(number),
                    lambda: self._calls.came("state", number),
                    call,
                )
                message = Message(Op.GET_STATE, number)
                self._loop.send_message(remote.server, TO_SERVER, message)

        self._calls.wait(call, begin)
        return unpacked_state(data)

    def set_state(self, key: Key, state: dict[str, torch.Tensor]) -> None:
        """Gives ``key`` the state that ``get_state`` returned, as worker 0 has it; collective."""
        remote = self._known(key, "set_state")
        self._calls.meet(f"set_state {key!r}")
        if self.rank == 0:
            call, memory = f"set_state of key {key!r}", packed_state(state)
            self._calls.ask(Op.SET_STATE, remote.server, call, remote.number, memory=memory)
        self._calls.meet(f"set_state {key!r}: done")

    def fail_with(self, error: BaseException) -> None:
        """Ends this worker's part in the store with ``error``; returns when servers have it."""
        self._calls.fail_with(error)

    # -- what begins in the loop's thread ----------------------------------------------

    def _push(self, key: Key, value: Any, priority: int) -> Callable[[Ended], None]:
        remote = self._known(key, "push", value)
        number = remote.number
        count = remote.begin_push(self.rank)
        memory = memory_of(flat_of(value))

        def begin(ended: Ended) -> None:
            # Two events, and only then the memory is free: it has left, and the server has it.
            what = f"push of key {key!r}"
            if self._calls.expect("push", number, what, remote.server, ended, 2):
                offset = self._transfer.offer(
                    remote.server, number, memory, lambda: self._calls.came("push", number)
                )
                message = Message(Op.PUSH, number, count, memory.nbytes, priority, offset=offset)
                self._loop.send_message(remote.server, TO_SERVER, message)

        return begin

    def _pull(self, key: Key, out: Any, priority: int) -> Callable[[Ended], None]:
        remote = self._known(key, "pull", out)
        number = remote.number
        flat = flat_of(out)
        is_direct = flat.data_ptr() == tensor_of(out).data_ptr()

        def begin(ended: Ended) -> None:
            def filled(error: BaseException | None) -> None:
                if error is None:
                    remote.is_pushed = False
                    if not is_direct:
                        tensor_of(out).copy_(flat.reshape(out.shape))
                ended(error)

            if self._calls.expect("pull", number, f"pull of key {key!r}", remote.server, filled):
                self._transfer.ask(
                    remote.server, number, memory_of(flat), lambda: self._calls.came("pull", number)
                )
                message = Message(Op.PULL, number, remote.count, priority=priority)
                self._loop.send_message(remote.server, TO_SERVER, message)

        return begin

    def _known(self, key: Key, call: str, value: Any = None) -> _Remote:
        self._calls.check(f"{call} of key {key!r}")
        return known(self._keys, key, call, value)

    def __repr__(self) -> str:
        return (
            f"<MPIKVStore worker {self.rank} of {self._num_workers}, servers {self._servers}, "
            f"{len(self._keys)} keys>"
        )
