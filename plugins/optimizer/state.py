"""The state of an optimizer whose updates are outstanding, for its users and for the updates."""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["AliasedState", "GuardedState"]


class GuardedState(defaultdict[Any, Any]):
    """``optimizer.state``; any use of it from outside applies what is outstanding first."""

    def __init__(self, content: Any, synchronize: Callable[[], None]) -> None:
        super().__init__(dict, content)
        self._synchronize = synchronize

    def raw(self, key: Any) -> Any:
        """The entry of ``key`` as it is now, made if missing, as ``self[key]`` makes it."""
        entry = dict.get(self, key)
        if entry is None:
            entry = {}
            dict.__setitem__(self, key, entry)
        return entry

    def plain(self) -> defaultdict[Any, Any]:
        """The same entries in an ordinary dictionary."""
        return defaultdict(dict, self.items())

    def __copy__(self) -> Any:
        return self.plain()

    def copy(self) -> Any:
        """The same entries in an ordinary dictionary."""
        return self.plain()

    def __or__(self, other: Any) -> Any:
        return self.plain() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.plain()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.plain(), memo)

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self.items()))


def _synchronized(name: str) -> Callable[..., Any]:
    method = getattr(defaultdict, name)

    @functools.wraps(method)
    def call(self: GuardedState, *args: Any) -> Any:
        self._synchronize()
        return method(self, *args)

    return call


_USES = """
    __contains__ __delitem__ __eq__ __getitem__ __iter__ __len__ __ne__ __repr__ __setitem__
    clear get items keys pop popitem setdefault update values
"""

for _name in _USES.split():
    setattr(GuardedState, _name, _synchronized(_name))


class AliasedState(dict[Any, Any]):
    """What a copy of the optimizer sees as its state: the entries of the real parameters."""

    def __init__(self, state: GuardedState, real: dict[nn.Parameter, nn.Parameter]) -> None:
        super().__init__()
        self._state = state
        self._real = real

    def __missing__(self, alias: Any) -> Any:
        return self._state.raw(self._real.get(alias, alias))

    def __contains__(self, alias: Any) -> bool:
        return dict.__contains__(self._state, self._real.get(alias, alias))

    def __setitem__(self, alias: Any, entry: Any) -> None:
        dict.__setitem__(self._state, self._real.get(alias, alias), entry)

    def __delitem__(self, alias: Any) -> None:
        dict.__delitem__(self._state, self._real.get(alias, alias))

    def get(self, alias: Any, default: Any = None) -> Any:
        """As of any dictionary."""
        return dict.get(self._state, self._real.get(alias, alias), default)

    def setdefault(self, alias: Any, default: Any = None) -> Any:
        """As of any dictionary."""
        return dict.setdefault(self._state, self._real.get(alias, alias), default)

    def pop(self, alias: Any, *default: Any) -> Any:
        """As of any dictionary."""
        return dict.pop(self._state, self._real.get(alias, alias), *default)


def _refused(name: str) -> Callable[..., Any]:
    def call(self: AliasedState, *args: Any) -> Any:
        raise TypeError(f"{name} of the state as a whole, in an update of some parameters alone")

    return call


_WHOLE = "__iter__ __len__ clear copy items keys popitem update values"

for _name in _WHOLE.split():
    setattr(AliasedState, _name, _refused(_name))
