"""What workers do together at a server: push, sum, update and pull one key; come to one call."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from time import monotonic
from typing import Any, NamedTuple

import torch

from bytesched.errors import InvalidTransition, MismatchError, PeerLost, PluginError

from .messages import Message


class Pull(NamedTuple):
    """A worker's request for the value, after so many pushes of its own."""

    worker: int
    pushes: int
    priority: int


class Spare:
    """Buffers that are reused, so that no step allocates."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """A buffer for as many elements; what it holds is undefined."""
        free = self._free.setdefault((like.numel(), like.dtype), [])
        return free.pop() if free else torch.empty_like(like)

    def drop(self, like: torch.Tensor) -> None:
        """No buffers for as many elements, until some are kept again."""
        self._free.pop((like.numel(), like.dtype), None)

    def keep(self, buffer: torch.Tensor) -> None:
        self._free.setdefault((buffer.numel(), buffer.dtype), []).append(buffer)


class ServerOptimizer:
    """Updates one value in place, by a class of torch.optim, with hyper-parameters of a step."""

    def __init__(self, name: str, value: torch.Tensor, hyperparameters: dict[str, Any]) -> None:
        kind = getattr(torch.optim, name, None)
        if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer):
            raise PluginError(f"torch.optim has no optimizer {name!r}")
        self._parameter = torch.nn.Parameter(value, requires_grad=value.is_floating_point())
        arguments = inspect.signature(kind).parameters
        known = {k: _from_json(v) for k, v in hyperparameters.items() if k in arguments}
        try:
            self._optimizer = kind([self._parameter], **known)
        except (TypeError, ValueError) as error:
            raise PluginError(f"torch.optim.{name} refuses {hyperparameters}: {error}") from error
        group = self._optimizer.param_groups[0]
        # A group has entries that the constructor does not take.
        if unknown := hyperparameters.keys() - group.keys():
            raise PluginError(f"torch.optim.{name} has no {', '.join(sorted(unknown))}")

    def update(self, gradient: torch.Tensor, hyperparameters: dict[str, Any]) -> None:
        """One step with ``gradient``."""
        group = self._optimizer.param_groups[0]
        for key, value in hyperparameters.items():
            group[key] = _from_json(value)
        self._parameter.grad = gradient
        self._optimizer.step()
        self._parameter.grad = None

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """The optimizer's state of this value, as tensors by name."""
        state = self._optimizer.state.get(self._parameter, {})
        return {name: torch.as_tensor(entry) for name, entry in state.items() if entry is not None}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Takes over what ``state`` was on another server."""
        self._optimizer.state[self._parameter] = {k: v.clone() for k, v in state.items()}


def _from_json(value: Any) -> Any:
    """JSON has no tuples, and optimizers check for them."""
    return tuple(value) if isinstance(value, list) else value


class Entry:
    """One key; its ``value`` is flat."""

    def __init__(
        self,
        number: int,
        name: str,
        value: torch.Tensor,
        shape: list[int],
        *,
        workers: int,
        spare: Spare,
    ) -> None:
        self.number = number
        self.name = name
        self.value = value
        self.shape = shape
        self.optimizer: ServerOptimizer | None = None
        #: whether the optimizer gets the sum divided by the number of workers
        self.average = True
        #: how often each worker has pushed it
        self.counts = [0] * workers
        #: values of this step that were received or are on their way
        self.taken = 0
        #: pushes that were announced, and are not on their way
        self.announced = 0
        #: when the oldest push of this step, or the oldest pull that waits, has come
        self.since_s = 0.0
        self._spare = spare
        #: how many steps are complete
        self._completed = 0
        #: this step's sum so far, and the worker whose value is added next
        self._total: torch.Tensor | None = None
        self._next_worker = 0
        #: received values of workers that come later in the sum
        self._arrived: dict[int, torch.Tensor] = {}
        #: hyper-parameters of this step: those that hold when worker 0 pulls, which is in step()
        self._hyperparameters: dict[str, Any] | None = None
        self._pulls: list[Pull] = []

    def announce(self, worker: int, message: Message) -> None:
        """``worker`` is about to push. Raises MismatchError and InvalidTransition."""
        if message.nbytes != self.value.nbytes:
            raise MismatchError(
                f"worker {worker} pushed {message.nbytes} bytes of key {self.name!r}, which has "
                f"{self.value.nbytes}"
            )
        if message.step != self.counts[worker] + 1:
            raise InvalidTransition(
                f"worker {worker} pushed step {message.step} of key {self.name!r} after step "
                f"{self.counts[worker]}"
            )
        self.counts[worker] += 1
        self.announced += 1
        self.note_wait()

    def receive(self, worker: int, value: torch.Tensor) -> None:
        """The value of ``worker`` is here, and is the entry's from now on."""
        self._arrived[worker] = value
        # In the order of the workers, so that the sum is the same in every run.
        while (following := self._arrived.pop(self._next_worker, None)) is not None:
            self._next_worker += 1
            if self._total is None:
                self._total = following
            else:
                self._total += following
                self._spare.keep(following)
        self._complete()

    def ask(self, pull: Pull, hyperparameters: dict[str, Any]) -> None:
        """A worker wants the value; with worker 0's pull come the step's ``hyperparameters``."""
        self._pulls.append(pull)
        if pull.worker == 0 and pull.pushes > self._completed:
            self._hyperparameters = hyperparameters
            self._complete()

    def _complete(self) -> None:
        """Ends the step, if all workers have pushed and its hyper-parameters are there."""
        if self._total is None or self._next_worker < len(self.counts):
            return
        if self.optimizer is not None and self._hyperparameters is None:
            return
        total, self._total = self._total, None
        self._next_worker = self.taken = 0
        self._completed += 1
        if self.optimizer is None:
            total, self.value = self.value, total
        else:
            if self.average:
                total /= len(self.counts)
            self.optimizer.update(total.reshape(self.shape), self._hyperparameters or {})
            self._hyperparameters = None
        self._spare.keep(total)

    def answerable(self, left: set[int]) -> list[Pull]:
        """Takes the pulls whose step is complete. PeerLost if one waits for a worker that left."""
        ready = [pull for pull in self._pulls if pull.pushes <= self._completed]
        self._pulls = [pull for pull in self._pulls if pull.pushes > self._completed]
        self.note_wait()
        self.check(left)
        return ready

    def check(self, left: Iterable[int]) -> None:
        """Raises PeerLost if a pull waits for a worker that has left."""
        for pull in self._pulls:
            for other in left:
                if self.counts[other] < pull.pushes:
                    raise PeerLost(
                        f"worker {other} left before step {pull.pushes} of key {self.name!r}, for "
                        f"which worker {pull.worker} waits"
                    )

    def note_wait(self) -> None:
        """Notes since when a worker waits for this key, if one does."""
        waits = self._pulls or self.announced or self.taken
        self.since_s = (self.since_s or monotonic()) if waits else 0.0

    def overdue(self, oldest_s: float) -> str:
        """Which workers are missing if others wait since before ``oldest_s``; else empty."""
        if not self.since_s or self.since_s >= oldest_s:
            return ""
        slowest = min(self.counts)
        missing = [worker for worker, count in enumerate(self.counts) if count == slowest]
        return (
            f"worker {listed(missing)} to push key {self.name!r} (step {slowest + 1}): stopped, "
            "stuck, or in other code"
        )


class Meetings:
    """Which workers have come to which meeting, and with which call."""

    def __init__(self, workers: int, left: set[int]) -> None:
        self._workers = workers
        #: those that will never come again; the server adds to it
        self._left = left
        #: by number of the meeting, what each worker calls
        self._here: dict[int, dict[int, str]] = {}
        self._since_s: dict[int, float] = {}

    def come(self, number: int, worker: int, what: str) -> str | None:
        """``worker`` is there; None until all are, and then what differs, if anything does.

        PeerLost if one has left.
        """
        here = self._here.setdefault(number, {})
        self._since_s.setdefault(number, monotonic())
        here[worker] = what
        self.check()
        if len(here) < self._workers:
            return None
        del self._here[number], self._since_s[number]
        different = next((w for w in sorted(here) if here[w] != here[0]), None)
        if different is None:
            return ""
        return f"worker 0 called {here[0]}, and worker {different} called {here[different]}"

    def check(self) -> None:
        """Raises PeerLost if a meeting waits for one of them."""
        for here in self._here.values():
            if absent := self._left - here.keys():
                what = next(iter(here.values()))
                raise PeerLost(f"worker {listed(absent)} left; others are at: {what}")

    def overdue(self, oldest_s: float) -> str:
        for number, since_s in self._since_s.items():
            if since_s < oldest_s:
                here = self._here[number]
                absent = [worker for worker in range(self._workers) if worker not in here]
                return f"worker {listed(absent)} at: {next(iter(here.values()))}"
        return ""


def listed(workers: Iterable[int]) -> str:
    """Their numbers, for a message."""
    return ", ".join(map(str, sorted(workers)))
