"""The state of an optimizer whose updates are outstanding, for its users and for the updates."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from sys import getrefcount
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import nn

from bytesched.errors import PluginError

from ..proxies.pending_grads import has_aliases


class GuardedState(defaultdict[Any, Any]):
    """``optimizer.state``; any use of it from outside applies what is outstanding first.

    Where other ranks hold entries, or parts of them, these raise PluginError when they are used:
    a script would take them for empty. A copy or a pickle has all of them.

    Args:
        known: of a state that was guarded before, and has been plain in between.
    """

    def __init__(
        self,
        content: Any,
        synchronize: Callable[[], None],
        known: dict[int, ref[torch.Tensor]] | None = None,
    ) -> None:
        super().__init__(dict, content)
        self._synchronize = synchronize
        #: parameters of which other ranks have something
        self._elsewhere: set[Any] = set()
        self._gather: Callable[[], dict[Any, Any]] = self._refuse
        #: ``state_dict()`` is about to read what is here, and what others have is added to that
        self._is_packed = False
        #: somebody outside has looked into it since nothing of it was found to be kept
        self._is_used = known is not None
        if known is None:
            kept = (each for each in self._kept() if isinstance(each, torch.Tensor))
            known = {id(each): ref(each) for each in kept}
        #: tensors that others had already, by id, as a checkpoint has those that were loaded
        self.known = known

    def is_kept(self) -> bool:
        """Whether the script has something of it that it took out, and may read without asking."""
        known = self.known
        self._is_used = self._is_used and any(
            (other := known.get(id(each))) is None or other() is not each for each in self._kept()
        )
        return self._is_used

    def _kept(self) -> Iterator[Any]:
        """The entries, and tensors in them, that others have."""
        # Lists, as an update in another thread may make entries.
        for entry in list(dict.values(self)):
            if getrefcount(entry) > _REFERENCES:
                yield entry
            for value in list(entry.values()) if isinstance(entry, dict) else ():
                if isinstance(value, torch.Tensor) and (
                    getrefcount(value) > _REFERENCES
                    or (value.layout is torch.strided and has_aliases(value))
                ):
                    yield value

    def lies_elsewhere(
        self, parameters: Iterable[Any], gather: Callable[[], dict[Any, Any]]
    ) -> None:
        """Other ranks hold something of ``parameters`` from now on.

        ``gather`` asks for it, and returns whole entries, those that are here among them.
        """
        self._elsewhere.update(parameters)
        self._gather = gather

    def packs(self) -> None:
        """What is read next is what is here, for `Optimizer.state_dict`."""
        self._is_packed = True

    def restore(self, entries: dict[Any, Any]) -> None:
        """These are all, and here."""
        dict.clear(self)
        dict.update(self, entries)
        self._elsewhere.clear()

    def abandon(self) -> bool:
        """Nothing is outstanding, and nobody is asked any more; whether entries are missing."""
        self._synchronize, self._gather = _nothing, self._refuse
        return bool(self._elsewhere)

    @property
    def is_abandoned(self) -> bool:
        """Whether that was done."""
        return self._synchronize is _nothing

    def raw(self, key: Any) -> Any:
        """The entry of ``key`` as it is now, made if missing, as ``self[key]`` makes it."""
        entry = dict.get(self, key)
        if entry is None:
            entry = {}
            dict.__setitem__(self, key, entry)
        return entry

    def plain(self) -> defaultdict[Any, Any]:
        """The same entries in an ordinary dictionary, with those that are asked for."""
        self._synchronize()
        self._is_used = True
        whole = self._gather() if self._elsewhere else {}
        return defaultdict(dict, {**whole, **{k: v for k, v in dict.items(self) if k not in whole}})

    def _refuse(self) -> dict[Any, Any]:
        raise PluginError(
            f"the optimizer's state of {len(self._elsewhere)} parameters is on other ranks "
            "(shard=True), which no longer answer: call optimizer.state_dict() or "
            "bytesched.unwrap(optimizer) while all ranks train, or load a checkpoint"
        )

    def _refuse_one(self, key: Any) -> NoReturn:
        raise PluginError(
            f"the optimizer's state of a parameter of shape {tuple(key.shape)} is wholly or "
            "partly on other ranks (shard=True): optimizer.state_dict() returns all of it, "
            "bytesched.sharded_state(optimizer) the part of this rank; code that reads or "
            "writes optimizer.state itself needs training without shard=True"
        )

    def _use_all(self) -> None:
        self._synchronize()
        self._is_used = True
        is_packed, self._is_packed = self._is_packed, False
        for key in () if is_packed else self._elsewhere:
            self._refuse_one(key)

    def __len__(self) -> int:
        self._synchronize()
        return len(self._elsewhere.union(dict.keys(self)))

    def clear(self) -> None:
        """As of any dictionary; other ranks are taken to do the same."""
        self._synchronize()
        self._elsewhere.clear()
        super().clear()

    def __repr__(self) -> str:
        self._synchronize()
        others = f", {len(self._elsewhere)} with other ranks" if self._elsewhere else ""
        return f"{super().__repr__()}{others}"

    def copy(self) -> Any:
        """The same entries in an ordinary dictionary."""
        return self.plain()

    __copy__ = copy

    def __or__(self, other: Any) -> Any:
        return self.plain() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.plain()

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self.plain()))


def _nothing() -> None:
    pass


def _references() -> int:
    """What getrefcount returns for what a dictionary, a list and a local variable refer to."""
    entries = {0: object()}
    (references,) = [getrefcount(value) for value in list(entries.values())]
    return references


_REFERENCES = _references()


def _of_one(name: str) -> Callable[..., Any]:
    method = getattr(defaultdict, name)

    @functools.wraps(method)
    def call(self: GuardedState, key: Any, *args: Any) -> Any:
        # A whole step comes here for every parameter: few calls.
        self._synchronize()
        self._is_used = True
        if self._elsewhere and key in self._elsewhere:
            self._refuse_one(key)
        return method(self, key, *args)

    return call


def _of_all(name: str) -> Callable[..., Any]:
    method = getattr(defaultdict, name)

    @functools.wraps(method)
    def call(self: GuardedState, *args: Any) -> Any:
        self._use_all()
        return method(self, *args)

    return call


_ONE = "__contains__ __delitem__ __getitem__ __setitem__ get pop setdefault"
_ALL = "__eq__ __iter__ __ne__ items keys popitem update values"

for _name in _ONE.split():
    setattr(GuardedState, _name, _of_one(_name))
for _name in _ALL.split():
    setattr(GuardedState, _name, _of_all(_name))


class AliasedState(MutableMapping[Any, Any]):
    """What a copy of the optimizer sees as its state: the entries of the real parameters."""

    def __init__(self, state: GuardedState, real: dict[nn.Parameter, nn.Parameter]) -> None:
        self._state = state
        self._real = real

    def __getitem__(self, alias: Any) -> Any:
        return self._state.raw(self._real.get(alias, alias))

    def __setitem__(self, alias: Any, entry: Any) -> None:
        dict.__setitem__(self._state, self._real.get(alias, alias), entry)

    def __delitem__(self, alias: Any) -> None:
        dict.__delitem__(self._state, self._real.get(alias, alias))

    def __contains__(self, alias: Any) -> bool:
        return dict.__contains__(self._state, self._real.get(alias, alias))

    def get(self, alias: Any, default: Any = None) -> Any:
        return dict.get(self._state, self._real.get(alias, alias), default)

    def setdefault(self, alias: Any, default: Any = None) -> Any:
        return dict.setdefault(self._state, self._real.get(alias, alias), default)

    def pop(self, alias: Any, *default: Any) -> Any:
        return dict.pop(self._state, self._real.get(alias, alias), *default)

    def __iter__(self) -> NoReturn:
        raise TypeError("the state as a whole is used in an update of some parameters alone")

    def __len__(self) -> NoReturn:
        iter(self)
