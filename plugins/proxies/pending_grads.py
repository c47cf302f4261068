"""Gradients whose sums have not come, in the memory that the framework gave them.

A gradient becomes pending by its class, and an ordinary tensor again by its first read. Whoever
refers to it, under whatever name, waits with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

import torch

from .pending import METADATA, PendingParameter, synchronize_now, tensors_in


class LooksPlain(type(torch.Tensor)):  # type: ignore[misc]
    """A class that is equal to Tensor, so that gradients take the fast paths they would take.

    ``clip_grad_norm_`` looks at types, and the kernels behind it round differently on a GPU.
    """

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is torch.Tensor

    #: Not that of Tensor: torch looks for a type in a list where it chooses a kernel, and in a set
    #: where it asks each class among the arguments once (torch.overrides).
    __hash__ = type.__hash__


class Sum(Protocol):
    """What a pending gradient waits for."""

    def answer(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What ``func`` makes of gradients that wait, as far as it need not wait for all of them.

        NotImplemented where it has to.
        """

    def settle(self) -> None:
        """Returns when the sum is in the gradient, which is an ordinary tensor from then on.

        It may be one already.
        """

    def zeroes(self) -> bool:
        """The gradient is about to be zeroed; whether that needs no wait.

        If so, the gradient is an ordinary tensor from now on, and the sum goes elsewhere.
        """


class PendingGrad(torch.Tensor, metaclass=LooksPlain):
    """A gradient that is being summed; the first read of its values waits."""

    #: what it waits for, a `Sum`
    sum_: Any

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        is_zeroing = func in _ZEROING
        if not is_zeroing and (first := _first_in(args)) is not None:
            answer = first.answer(func, args, kwargs)
            if answer is not NotImplemented:
                return answer
        sums: dict[Any, None] = {}
        for tensor in tensors_in((args, kwargs)):
            if type(tensor) is PendingGrad:
                # Another thread may make it an ordinary one meanwhile.
                if (sum_ := getattr(tensor, "sum_", None)) is not None:
                    sums[sum_] = None
            elif type(tensor) is PendingParameter:
                synchronize_now(tensor)
        # All of them are told that they are read: the first one may bring others.
        for sum_ in sums:
            if not (is_zeroing and sum_.zeroes()):
                sum_.settle()
        # They are ordinary tensors now.
        return func(*args, **kwargs)

    # These ask no class.

    def as_subclass(self, cls: Any) -> Any:
        self.sum_.settle()
        return self.as_subclass(cls)

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        self.sum_.settle()
        return self.set_(*args, **kwargs)


def _first_in(args: Any) -> Any:
    """What the first argument waits for, or the first of a list of gradients."""
    first = args[0] if args else None
    if isinstance(first, (list, tuple)):
        first = first[0] if first else None
    return getattr(first, "sum_", None) if type(first) is PendingGrad else None


def make_plain(grad: PendingGrad) -> None:
    """Makes ``grad`` an ordinary tensor, for all who refer to it."""
    del grad.sum_
    grad.__class__ = torch.Tensor  # type: ignore[assignment]


_ZEROING: Final = frozenset({torch.Tensor.zero_, torch._foreach_zero_})


def ready(values: Any) -> None:
    """Waits for every tensor among ``values``, which may be nested, that is outstanding."""
    # Not by `tensors_in`: this is in front of every message between ranks.
    kind = type(values)
    if kind is PendingParameter:
        synchronize_now(values)
    elif kind is PendingGrad:
        values.sum_.settle()
    elif isinstance(values, (list, tuple)):
        for value in values:
            ready(value)
    elif isinstance(values, dict):
        for value in values.values():
            ready(value)


def has_aliases(tensor: torch.Tensor) -> bool:
    """True if there are other tensors over the memory of ``tensor``; does not wait for it."""
    with torch._C.DisableTorchFunctionSubclass():
        storage = tensor.untyped_storage()
        # One of them is ``storage`` itself.
        return torch._C._storage_Use_Count(storage._cdata) > 2
