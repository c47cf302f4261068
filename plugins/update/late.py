"""Parameter groups that are known when an update comes to them, and not before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["LateGroups"]


class LateGroups(list[dict[str, Any]]):
    """The groups that a function returns, which is called when somebody first looks.

    An optimizer's ``step()`` looks after all of its pre-hooks have run.
    """

    def __init__(self, find: Callable[[], list[dict[str, Any]]]) -> None:
        super().__init__()
        self._find: Callable[[], list[dict[str, Any]]] | None = find

    def _look(self) -> None:
        if (find := self._find) is not None:
            self._find = None
            self.extend(find())

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._look()
        return super().__iter__()

    def __len__(self) -> int:
        self._look()
        return super().__len__()

    def __getitem__(self, index: Any) -> Any:
        self._look()
        return super().__getitem__(index)
