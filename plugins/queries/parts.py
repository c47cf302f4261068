"""How a number for a tensor that several ranks own follows from the numbers for its parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Final

import torch

from ..layout.plan import Plan
from ..layout.slots import Slot
from .operations import NORMS, NORMS_OF_ALL
from .questions import kind_of_norm

__all__ = ["EXACT_PARTS", "Places", "Rule", "rule_of"]

#: Up to so many parts, an answer has the bits of the whole tensor's.
EXACT_PARTS: Final = 2


class Rule(Enum):
    """What is made of the numbers for the parts of a tensor."""

    NONE = "the number of the whole tensor, which one rank measures"
    SUM = "their sum"
    ROOT_OF_SQUARES = "the root of the sum of their squares"
    GREATEST = "the greatest"
    LEAST = "the least"


#: of the numbers of each tensor's parts, in the order of the ranks; of NONE all but one are 0
_COMBINED: Final[dict[Rule, Callable[[torch.Tensor], torch.Tensor]]] = {
    Rule.NONE: torch.sum,
    Rule.SUM: torch.sum,
    Rule.ROOT_OF_SQUARES: lambda parts: parts.square().sum().sqrt(),
    Rule.GREATEST: torch.amax,
    Rule.LEAST: torch.amin,
}

#: The same bits in whatever parts.
_EXACT: Final = {
    "all": Rule.LEAST,
    "amax": Rule.GREATEST,
    "amin": Rule.LEAST,
    "any": Rule.GREATEST,
    "count_nonzero": Rule.SUM,
    "max": Rule.GREATEST,
    "min": Rule.LEAST,
}
_EXACT_NORMS: Final = {float("inf"): Rule.GREATEST, float("-inf"): Rule.LEAST}


def rule_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], parts: int) -> Rule:
    """The rule of ``func``, where tensors have up to so many parts."""
    name = getattr(func, "__name__", "")
    if name in _EXACT:
        return _EXACT[name]
    if func in NORMS | NORMS_OF_ALL:
        kind = kind_of_norm(args, kwargs)
        if kind in _EXACT_NORMS:
            return _EXACT_NORMS[kind]
        if parts > EXACT_PARTS and kind in (None, 2, "fro"):
            return Rule.ROOT_OF_SQUARES
    if parts > EXACT_PARTS and name == "sum":
        return Rule.SUM
    return Rule.NONE


class Places:
    """Where an answer has the numbers of each tensor: one for each part, in the order of ranks.

    Two ranks never have a number for the same place, so that answers that are added up have
    every number as it was measured, the same on all ranks.
    """

    def __init__(self, plan: Plan) -> None:
        #: first place, and how many there are
        self._of: dict[Slot, tuple[int, int]] = {}
        self.count = 0
        for slot in plan.slots:
            parts = max(1, len(plan.shares(slot)))
            self._of[slot] = self.count, parts
            self.count += parts

    def of(self, slot: Slot, part: int = 0) -> int:
        """That of a part; the first one is that of the whole tensor, too."""
        return self._of[slot][0] + part

    def combined(self, numbers: torch.Tensor, rule: Rule) -> torch.Tensor:
        """One number for each tensor, of one for each place."""
        made = numbers[[first for first, _ in self._of.values()]]
        for index, (first, parts) in enumerate(self._of.values()):
            if parts > 1:
                made[index] = _COMBINED[rule](numbers[first : first + parts])
        return made

    def __repr__(self) -> str:
        return f"<Places {self.count} of {len(self._of)} tensors>"
