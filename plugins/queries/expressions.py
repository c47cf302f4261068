"""What a script makes of a gradient, element by element, while the gradient is on the wire.

``(p.grad ** 2).sum()`` is one number of a tensor that nobody else looks at. So the square is kept
as an expression: whoever owns the gradient computes it, with the script's own operations, and so
with the same bits. If something looks at its elements after all, it waits for the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from weakref import ref

import torch

from bytesched.round import ALLOWED, UNTAKEN, Use

from ..dependency.progress import Progress
from ..layout.memory import lies_over
from ..layout.slots import Slot
from ..proxies.lazy_grads import LazyGrad, alias_of, free, moves_alone, plain
from .operations import ALIASES, FLATTENING, PURE

__all__ = ["Asked", "Expression", "derived", "expression_of", "slots_in"]

#: From this share of all bytes on, a script has asked about its gradients, and not about some.
_MOST: Final = 0.5


@dataclass(frozen=True)
class Expression:
    """A tensor that is made of one gradient."""

    slot: Slot
    #: makes it of the gradient, or of another one
    of: Callable[[torch.Tensor], torch.Tensor]
    #: the same on all ranks for the same operations
    text: str = ""
    #: how many changes of the gradient it has in it; None: it shows all, as it shares its memory
    changes: int | None = None


def expression_of(tensor: object) -> Expression | None:
    """What ``tensor`` is made of, if that may be on the wire and no step has taken it.

    None where the gradient was read whole in this round: there may be aliases of its memory. None
    for what was kept from an earlier round, whose memory is its own.
    """
    owner = tensor.owner if type(tensor) is LazyGrad else None
    if isinstance(owner, Slot):
        is_current = lies_over(tensor, owner.view)  # type: ignore[arg-type]
        owner = Expression(owner, _same)
    elif isinstance(owner, Expression):
        is_current = owner.changes == len(owner.slot.changes)
        if owner.changes is None:
            with torch._C.DisableTorchFunctionSubclass():
                is_current = tensor.data_ptr() == owner.slot.view.data_ptr()  # type: ignore[attr-defined]
    else:
        return None
    slot = owner.slot
    is_askable = slot.state in ALLOWED[Use.ASK] and not slot.is_read
    return owner if is_current and is_askable else None


def derived(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], *, with_memory: bool = True
) -> Any:
    """What ``func`` makes of a gradient, without waiting for it; or NotImplemented.

    Args:
        with_memory: also what has memory of its own.
    """
    if func in ALIASES:
        may_be = isinstance(getattr(args[0], "owner", None), Slot) and not moves_alone(args[0])
        return alias_of(args[0]) if may_be and expression_of(args[0]) else NotImplemented
    if func is torch.Tensor.cpu and len(args) == 1 and not kwargs and args[0].device.type == "cpu":
        return args[0]
    if func not in PURE or not _is_elementwise(func, args, kwargs):
        return NotImplemented
    parts = [expression_of(arg) if isinstance(arg, torch.Tensor) else None for arg in args]
    source = parts[0]
    if source is None or not source.slot.allows(Use.DERIVE) or source.slot.is_apart:
        return NotImplemented
    slot = source.slot
    for arg, part in zip(args, parts, strict=True):
        if isinstance(arg, torch.Tensor) and (part is None or part.slot is not slot):
            return NotImplemented
    named = [
        repr(arg) if part is None else part.text for arg, part in zip(args, parts, strict=True)
    ]
    text = f"{func.__name__}({', '.join(named)}, {sorted(kwargs.items())})"
    # No gradient among them: what is kept of it shall not keep it.
    made_of = [arg if part is None else part.of for arg, part in zip(args, parts, strict=True)]

    def of(tensor: torch.Tensor) -> torch.Tensor:
        given = [make(tensor) if callable(make) else make for make in made_of]
        made: torch.Tensor = func(*given, **kwargs)
        return made

    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        view = slot.view
        model = torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device="meta")
        models = [make(model) if callable(make) else make for make in made_of]
        try:
            after = func(*models, **kwargs)
        except (RuntimeError, TypeError, ValueError):
            # The gradient itself raises what the script is to see.
            return NotImplemented
        if after is models[0]:
            return args[0]
        if _memory(after) == _memory(model):
            if moves_alone(view):
                return NotImplemented
            return _alias(args[0], func(*args, **kwargs), Expression(slot, of, text))
        if not with_memory or _memory(after) == _memory(models[0]):
            return NotImplemented
        memory = torch.empty_strided(
            after.shape, after.stride(), dtype=after.dtype, device=view.device
        )
        result: LazyGrad = torch.Tensor._make_subclass(LazyGrad, memory)
    result.synchronize, result.is_taken = args[0].synchronize, lambda: False
    result.queries, result.owner = args[0].queries, Expression(slot, of, text, len(slot.changes))
    slot.look(partial(_compute, ref(result), of))
    return result


def slots_in(args: Sequence[Any]) -> Iterator[Slot]:
    """Those of the gradients in the first argument, which may be a list of them."""
    first = args[0] if args else None
    for tensor in first if isinstance(first, (list, tuple)) else [first]:
        if (expression := expression_of(tensor)) is not None:
            yield expression.slot


class Asked:
    """Of how many gradients a script has asked something in a round, or changed them.

    Args:
        slots: those of the model.
    """

    def __init__(self, slots: Sequence[Slot], progress: Progress) -> None:
        self._all = slots
        self._progress = progress
        self._asked: set[Slot] = set()
        #: of all gradients of the round, and of those that had not come when it asked first
        self._nbytes = self._late_bytes = 0

    def add(self, slots: Iterable[Slot]) -> None:
        """Something was asked of these; no optimizer has stepped when the first are added."""
        if not self._asked:
            self._nbytes = sum([slot.view.nbytes for slot in self._all if slot.state in UNTAKEN])
            self._late_bytes = self._progress.outstanding_bytes
        self._asked.update(slots)

    def clear(self) -> None:
        """A new round begins."""
        self._asked.clear()

    @property
    def are_most(self) -> bool:
        """Whether they are most of all bytes: for fewer, a wait for themselves is shorter."""
        nbytes = sum([slot.view.nbytes for slot in self._asked])
        return nbytes > 0 and nbytes >= _MOST * self._nbytes

    @property
    def late_share(self) -> float:
        """Of all bytes, the share that had not come when the script asked first."""
        return self._late_bytes / max(self._nbytes, 1)


def _is_elementwise(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether ``func`` makes the same of every gradient, whatever its shape."""
    if func in FLATTENING:
        return list(args[1:]) in ([], [-1]) and not kwargs
    plain_values = (bool, int, float, torch.dtype, torch.memory_format)
    return all(
        value is None or isinstance(value, (*plain_values, torch.Tensor)) for value in args
    ) and all(value is None or isinstance(value, plain_values) for value in kwargs.values())


def _compute(
    result: Callable[[], LazyGrad | None],
    of: Callable[[torch.Tensor], torch.Tensor],
    gradient: torch.Tensor,
) -> None:
    """The gradient is here, with the changes that were made before ``result`` was asked for."""
    tensor = result()
    if tensor is not None and tensor.owner is not None:
        with torch._C.DisableTorchFunctionSubclass():
            plain(tensor).copy_(of(gradient))
        free(tensor)


def _alias(grad: LazyGrad, view: torch.Tensor, owner: Expression) -> LazyGrad:
    """``view``, which is over the memory of ``grad``, as a tensor that waits as ``grad`` does."""
    alias = view.as_subclass(LazyGrad)
    alias.synchronize, alias.is_taken = grad.synchronize, grad.is_taken
    alias.queries, alias.owner = grad.queries, owner
    alias.storage_id = grad.storage_id
    return alias


def _memory(tensor: torch.Tensor) -> int:
    cdata: int = tensor.untyped_storage()._cdata
    return cdata


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
