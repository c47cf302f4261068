"""Whether an optimizer seems to update each parameter by itself: tried on small copies of it.

One copy steps over all of its parameters at once, as the script would have it; the other as
`Deferred` does, parameter by parameter and in another order. If they end with different bits, so
would the real ones. If not, nothing is proved, as an optimizer may do something else in later
steps or with larger tensors: it is advice for whoever reads its source, and decides nothing.
"""

from __future__ import annotations

import copy
import inspect
import random
import sys
import threading
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..layout.slots import Slot
from .deferred import Deferred
from .delegation import HOOKS, raw_step
from .frozen import snapshot

__all__ = ["TRIED_STEPS", "why_not_separable"]

#: Longer than the intervals at which optimizers do something now and then.
TRIED_STEPS: Final = 12
#: of gradients, in turn: what is clipped is clipped in some steps
_SCALES: Final = (1.0, 100.0, 0.01)
#: elements along each dimension, and stand-ins of one shape in a group
_LONGEST, _ALIKE = 24, 2

_COLLECTIVES: Final = ("c10d", "_c10d_functional", "c10d_functional")


def why_not_separable(optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]) -> str:
    """Why ``kind`` must step over all parameters of ``optimizer`` at once; empty if none was found.

    ``optimizer`` itself is not touched, and every generator of random numbers is left as it was.
    """
    if "step" in inspect.unwrap(raw_step(kind)).__code__.co_names:
        return f"{kind.__name__}.step calls the step of another class"
    return _tried(optimizer, kind)


def _tried(optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]) -> str:
    try:
        with warnings.catch_warnings(), _as_before():
            warnings.simplefilter("ignore")
            return _compared(optimizer, kind)
    except Exception as error:  # noqa: BLE001 - of anyone's class
        return f"{kind.__name__} cannot be tried on copies: {type(error).__name__}: {error}"


def _compared(optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]) -> str:
    whole, apart = _Copy(optimizer, kind), _Apart(optimizer, kind)
    attributes = _attributes(whole.optimizer)
    random_state = _random_state(whole.parameters)
    for step in range(TRIED_STEPS):
        if not whole.step(step):
            return f"{kind.__name__}.step does not call its closure once, before all else"
        _in_a_thread(lambda step=step: apart.step(step))  # type: ignore[misc]
        if not _same_random(random_state, _random_state(whole.parameters)):
            return f"{kind.__name__} draws random numbers"
        if not whole.equals(apart):
            return f"{kind.__name__} does not update each parameter on its own"
    if not _same_attributes(attributes, _attributes(whole.optimizer)):
        return f"{kind.__name__} changes its attributes as it steps"
    return ""


class _Copy:
    """The optimizer, over small parameters of the same kinds."""

    def __init__(self, optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]) -> None:
        self.optimizer: Any = kind.__new__(kind)
        self._step = raw_step(kind)
        self._takes_closure = "closure" in inspect.signature(self._step).parameters
        memo: dict[int, Any] = {id(optimizer): self.optimizer}
        groups = [_stand_ins(group["params"], memo) for group in optimizer.param_groups]
        self.parameters = [parameter for group in groups for parameter in group]
        for name, value in vars(optimizer).items():
            if name not in ("state", "param_groups", *HOOKS):
                # Without what cannot be copied: a step that needs it fails, and is not taken.
                with suppress(Exception):
                    setattr(self.optimizer, name, copy.deepcopy(value, memo))
        for name in HOOKS:
            setattr(self.optimizer, name, OrderedDict())
        self.optimizer.param_groups = [
            {**copy.deepcopy(_hyperparameters(group), memo), "params": stand_ins}
            for group, stand_ins in zip(optimizer.param_groups, groups, strict=True)
        ]
        self.optimizer.state = defaultdict(dict)
        taken: set[int] = set()
        for key, entry in dict.items(optimizer.state):
            if not isinstance(key, Tensor):
                self.optimizer.state[key] = copy.deepcopy(entry, memo)
            elif id(key) in memo and id(memo[id(key)]) not in taken:
                taken.add(id(memo[id(key)]))
                self.optimizer.state[memo[id(key)]] = _small_entry(key, entry, memo)

    def step(self, number: int) -> bool:
        """Steps over everything; false if the closure was not called as it must be."""
        weights = [parameter.detach().clone() for parameter in self.parameters]
        calls: list[bool] = []

        def closure() -> Tensor:
            calls.append(all(map(torch.equal, weights, self.parameters)))
            self._differentiate(number)
            return torch.zeros(())

        with _NoCollectives():  # type: ignore[no-untyped-call]
            if not self._takes_closure:
                self._differentiate(number)
                self._step(self.optimizer)
                return True
            # What it would see if it looked before.
            self._differentiate(number + TRIED_STEPS)
            self._step(self.optimizer, closure)
        return calls == [True]

    def _differentiate(self, number: int) -> None:
        for parameter, gradient in zip(self.parameters, self.gradients(number), strict=True):
            parameter.grad = gradient

    def gradients(self, number: int) -> Iterator[Tensor]:
        """Those of one step, the same for every copy."""
        generator = torch.Generator().manual_seed(number)
        scale = _SCALES[number % len(_SCALES)]
        for parameter in self.parameters:
            gradient = scale * torch.randn(parameter.shape, generator=generator, device="cpu")
            yield gradient.to(parameter.device, parameter.dtype)

    def equals(self, other: _Copy) -> bool:
        """Whether parameters, states and groups have the same bits."""
        return (
            _same(self.parameters, other.parameters)
            and _same(self._states(), other._states())
            and _same(
                [_hyperparameters(group) for group in self.optimizer.param_groups],
                [_hyperparameters(group) for group in other.optimizer.param_groups],
            )
        )

    def _states(self) -> list[Any]:
        state = dict(dict.items(self.optimizer.state))
        entries = [state.pop(parameter, {}) for parameter in self.parameters]
        return [entries, state]


class _Apart(_Copy):
    """The same, as it is deferred: what is there at once is nothing, and the rest comes later."""

    def __init__(self, optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]) -> None:
        super().__init__(optimizer, kind)
        self._deferred = Deferred(self.optimizer, kind, lambda: None, cross=True)
        self._slots = {}
        for index, parameter in enumerate(self.parameters):
            slot = Slot(str(index), parameter)
            slot.view = torch.zeros_like(parameter.detach())
            slot.realias()
            self._deferred.know(slot)
            self._slots[parameter] = slot

    def step(self, number: int) -> bool:
        groups = self.optimizer.param_groups
        taken = [snapshot(group) for group in groups]
        now = self._deferred.copy_of_nothing()

        def closure() -> Tensor:
            for slot, gradient in zip(self._slots.values(), self.gradients(number), strict=True):
                slot.view.copy_(gradient)
            vars(now).update(vars(self._deferred.copy_of_nothing()))
            self._deferred.steps(now.param_groups)
            return torch.zeros(())

        with _NoCollectives():  # type: ignore[no-untyped-call]
            if self._takes_closure:
                self._step(now, closure)
            else:
                closure()
                self._step(now)
            self._deferred.stepped(now)
            for group, hyperparameters in zip(reversed(groups), reversed(taken), strict=True):
                slots = [self._slots[parameter] for parameter in reversed(group["params"])]
                together = 1 + number % 2
                for first in range(0, len(slots), together):
                    batch = slots[first : first + together]
                    self._deferred.update([(hyperparameters, batch)])
        return True


class _NoCollectives(TorchDispatchMode):
    """Refuses to communicate: not all ranks need to be here."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace in _COLLECTIVES:
            raise RuntimeError("it communicates")
        return func(*args, **(kwargs or {}))


def _stand_ins(parameters: list[nn.Parameter], memo: dict[int, Any]) -> list[nn.Parameter]:
    """A few small ones of each shape; in ``memo`` each parameter has one that stands for it."""
    alike: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        stand_ins = alike.setdefault((_small_shape(parameter), parameter.dtype), [])
        if len(stand_ins) < _ALIKE:
            generator = torch.Generator().manual_seed(len(memo))
            values = torch.randn(_small_shape(parameter), generator=generator, device="cpu")
            values = values.to(parameter.device, parameter.dtype)
            stand_ins.append(nn.Parameter(values, parameter.requires_grad))
        memo[id(parameter)] = stand_ins[-1]
    return [stand_in for stand_ins in alike.values() for stand_in in stand_ins]


def _small_shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(min(length, _LONGEST) for length in tensor.shape)


def _small_entry(parameter: Tensor, entry: Any, memo: dict[int, Any]) -> Any:
    """The state of a stand-in, from that of a parameter; empty if it cannot be made of it."""
    small = {}
    for name, value in entry.items():
        if not isinstance(value, Tensor):
            small[name] = copy.deepcopy(value, memo)
        elif value.shape == parameter.shape:
            small[name] = value[tuple(slice(_LONGEST) for _ in value.shape)].clone()
        elif value.numel() == 1:
            small[name] = value.clone()
        else:
            return {}
    return small


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {k: v for k, v in vars(optimizer).items() if k not in ("state", "param_groups")}


def _same_attributes(before: dict[str, Any], after: dict[str, Any]) -> bool:
    return before.keys() == after.keys() and all(before[name] is after[name] for name in before)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return bool(((one == other) | ((one != one) & (other != other))).all())
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one is other or one == other or (one != one and other != other))


def _random_state(parameters: list[nn.Parameter]) -> list[Any]:
    devices = {p.device for p in parameters if p.device.type == "cuda"}
    on_devices = [torch.cuda.get_rng_state(device) for device in devices]
    return [random.getstate(), _numpy_state(), torch.get_rng_state(), *on_devices]


def _numpy_state() -> Any:
    """Of its global generator, as lists; None where numpy is not in use."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    name, keys, *rest = numpy.random.get_state()
    return [name, keys.tolist(), *rest]


def _same_random(before: list[Any], after: list[Any]) -> bool:
    return all(map(_same, before, after))


@contextmanager
def _as_before() -> Iterator[None]:
    """Random numbers afterwards are those that would have been drawn without."""
    state, of_numpy = random.getstate(), _numpy_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(state)
        if of_numpy is not None:
            sys.modules["numpy"].random.set_state(tuple(of_numpy))


def _in_a_thread(call: Callable[[], object]) -> None:
    """Where updates run: grad mode, number of threads and the like are another's there."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    thread = threading.Thread(target=run, name="bytesched-probe")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
