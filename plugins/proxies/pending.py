"""Parameters whose update is outstanding.

The dependency proxy of ByteScheduler (SOSP'19, sec. 4.2), put where every Python reader has to
pass: the parameter itself. While its update is outstanding its class is PendingParameter, whose
first use synchronizes it and gives the class back.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

#: what may be done -> to which properties
_PROPERTIES = {
    "__get__": "_backward_hooks _post_accumulate_grad_hooks _version device dtype grad grad_fn "
    "is_cpu is_cuda is_leaf is_sparse layout names ndim output_nr requires_grad shape",
    "__set__": "_backward_hooks _post_accumulate_grad_hooks grad requires_grad",
    "__delete__": "grad",
}
_METHODS = """
    __len__ dim element_size is_complex is_contiguous is_floating_point nelement numel
    register_hook register_post_accumulate_grad_hook requires_grad_ size stride
"""

#: Reads that say nothing about the values. They must not wait: ``zero_grad()`` reads ``p.grad``,
#: and waiting there would bring the barrier back without any test of values noticing.
METADATA: frozenset[Any] = frozenset(
    getattr(getattr(torch.Tensor, name), access)
    for access, names in _PROPERTIES.items()
    for name in names.split()
    if hasattr(torch.Tensor, name)
) | frozenset(getattr(torch.Tensor, name) for name in _METHODS.split())


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors among ``value``, which may be nested."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: list[torch.Tensor] = []
    if isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            # Most lists have nothing else: no call for each of them.
            if isinstance(item, torch.Tensor):
                found.append(item)
            else:
                found += tensors_in(item)
    return found


_GRAD: Any = torch.Tensor.grad

#: id of a held parameter -> what synchronizes it; the session keeps the parameter alive meanwhile
_pending: dict[int, Callable[[], None]] = {}


class PendingParameter(nn.Parameter):
    """A Parameter whose update is outstanding; its first real use waits for it."""

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
        for tensor in tensors_in((args, kwargs)):
            if type(tensor) is PendingParameter:
                synchronize_now(tensor)
        return func(*args, **kwargs)

    # ``zero_grad()`` reads and writes it for every parameter: a shorter way than the one above.

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient; it does not wait."""
        with torch._C.DisableTorchFunctionSubclass():
            return _GRAD.__get__(self)  # type: ignore[no-any-return]

    @grad.setter
    def grad(self, grad: torch.Tensor | None) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            _GRAD.__set__(self, grad)

    @grad.deleter
    def grad(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            _GRAD.__delete__(self)

    # These look at the type before they look at the values.

    def as_subclass(self, cls: Any) -> Any:
        synchronize_now(self)
        return self.as_subclass(cls)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        synchronize_now(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        synchronize_now(self)
        return self.__reduce_ex__(protocol)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def synchronize_now(parameter: nn.Parameter) -> None:
    """Waits until the update of ``parameter`` is applied, and gives it its class back."""
    synchronize = _pending.get(id(parameter))
    if synchronize is not None:
        synchronize()
    # Else another thread has just released it.
    if type(parameter) is PendingParameter:
        release(parameter)


def hold(parameter: nn.Parameter, synchronize: Callable[[], None]) -> None:
    """Makes ``parameter`` pending: its next use calls ``synchronize`` first."""
    hold_all([(parameter, synchronize)])


def hold_all(held: Iterable[tuple[nn.Parameter, Callable[[], None]]]) -> None:
    """Each of these parameters becomes pending, as by `hold`; one call for all of them."""
    for parameter, synchronize in held:
        _pending[id(parameter)] = synchronize
        parameter.__class__ = PendingParameter


def release_all(held: Iterable[tuple[nn.Parameter, Callable[[], None]]]) -> None:
    """Undoes `hold_all`, but for what somebody else holds by now; one call for all of them."""
    for parameter, synchronize in held:
        if _pending.get(id(parameter)) is synchronize:
            parameter.__class__ = nn.Parameter
            del _pending[id(parameter)]


def release(parameter: nn.Parameter) -> None:
    """Gives ``parameter`` its class back."""
    parameter.__class__ = nn.Parameter
    _pending.pop(id(parameter), None)


def is_held(parameter: nn.Parameter) -> bool:
    """True while ``parameter`` is pending."""
    return type(parameter) is PendingParameter
