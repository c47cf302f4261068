"""What a script asks of gradients that owners have: they measure it, and tell all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import Any, Final

import torch

from ..planned.buckets import Member
from ..planned.questions import Measure, Questions
from ..queries import NORMS, NORMS_OF_ALL, UNSCALE, kind_of_norm

_Combine = Callable[[torch.Tensor], torch.Tensor]
_GREATEST: Final[_Combine] = methodcaller("amax", 0)
_LEAST: Final[_Combine] = methodcaller("amin", 0)

#: what is made of the numbers for the parts of a tensor, by the name of what is asked
_COMBINED: Final[dict[str, _Combine]] = {
    **dict.fromkeys(("amax", "any", "max"), _GREATEST),
    **dict.fromkeys(("all", "amin", "min"), _LEAST),
    **dict.fromkeys(("count_nonzero", "sum"), methodcaller("sum", 0)),
}
#: the same by the order of a norm
_NORMS: Final[dict[Any, _Combine]] = {
    **dict.fromkeys((None, 2, "fro"), lambda parts: parts.square().sum(0).sqrt()),
    float("inf"): _GREATEST,
    float("-inf"): _LEAST,
}


class OwnersQuestions(Questions):
    """Of one sharded session; every rank asks the same.

    Args:
        owned: where a gradient's sum is here; None: nowhere.
        owners: whose numbers count, one rank, or all where each has a part.
        ask: what all ranks have measured, a row of each; collective: with a text for what is asked.
    """

    def __init__(
        self,
        rank: int,
        owned: Callable[[Member], torch.Tensor | None],
        owners: Callable[[Member], Sequence[int]],
        ask: Callable[[str, Callable[[], torch.Tensor]], torch.Tensor],
    ) -> None:
        super().__init__(rank, lambda: torch.empty(0))
        self._owned = owned
        self._owners = owners
        self._ask_all = ask

    def _ask(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        measure: Measure,
        members: Sequence[Member],
    ) -> list[torch.Tensor] | None:
        owners = [self._owners(member) for member in members]
        combine = _rule_of(func, args, kwargs)
        question = self._question(func, args, kwargs, measure, members)
        if question is None or (combine is None and any(len(some) > 1 for some in owners)):
            return None

        def measured() -> torch.Tensor:
            row = torch.zeros(len(members), dtype=torch.float64, device="cpu")
            here = [(at, self._owned(member)) for at, member in enumerate(members)]
            mine = [(at, memory) for at, memory in here if memory is not None]
            if mine:
                found = question.of([memory for _, memory in mine])
                row[[at for at, _ in mine]] = torch.tensor(found, dtype=torch.float64, device="cpu")
            return row

        # What cannot be asked is raised on all ranks, before any of them waits.
        kinds = self._kinds(measure, members)
        names = ",".join(member.name for member in members)
        rows = self._ask_all(f"{question.text} of {names}", measured)
        numbers = [
            rows[some[0], at] if len(some) == 1 or combine is None else combine(rows[:, at])
            for at, some in enumerate(owners)
        ]
        return self._as_measured(numbers, kinds, members)


def _rule_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> _Combine | None:
    if func is UNSCALE:
        return _GREATEST
    if func in NORMS | NORMS_OF_ALL:
        return _NORMS.get(kind_of_norm(args, kwargs))
    return _COMBINED.get(getattr(func, "__name__", ""))
