"""Gradients that are still on the wire: the first read of their values waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from .metadata import METADATA, tensors_in
from .pending import PendingParameter, synchronize_now
from .pending_grads import LooksPlain, PendingGrad

__all__ = [
    "LazyGrad",
    "free",
    "has_aliases",
    "has_own_memory",
    "keep_apart",
    "lazy_over",
    "move_apart",
    "moves_alone",
    "plain",
    "point",
    "ready",
    "settle",
]

#: whether a storage can be given other memory, with all tensors over it (since torch 2.13)
_CAN_SWAP: Final = hasattr(torch.UntypedStorage, "_swap_data_ptr_")


class LazyGrad(torch.Tensor, metaclass=LooksPlain):
    """A gradient that is being reduced; the first read of its values waits."""

    def as_subclass(self, cls: Any) -> Any:
        self.synchronize()
        keep_apart(self)
        with torch._C.DisableTorchFunctionSubclass():
            return torch.Tensor.as_subclass(self, cls)

    #: both set by the session that owns the memory
    synchronize: Callable[[], None]
    #: true if ``step()`` has taken the gradient; zeroing then only concerns the next one
    is_taken: Callable[[], bool]
    #: the script may have the address of its memory, which is its own
    is_kept: bool = False
    #: of the storage that it was made over; the script may put another there
    storage_id: int = 0

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ZEROING:
            for tensor in tensors_in(args):
                if type(tensor) is LazyGrad and tensor.is_taken():
                    _give_own_memory(tensor)
        if func not in METADATA:
            for tensor in tensors_in((args, kwargs)):
                if type(tensor) is LazyGrad:
                    tensor.synchronize()
                elif type(tensor) is PendingParameter:
                    synchronize_now(tensor)
                elif type(tensor) is PendingGrad:
                    tensor.sum_.settle()
        if func is torch.Tensor.detach_:
            return args[0]
        if func in _EXPORTS:
            keep_apart(args[0])
        with torch._C.DisableTorchFunctionSubclass():
            if func in _AS_PLAIN:
                return func(plain(args[0]), *args[1:], **kwargs)
            result = func(*args, **kwargs)
        if func not in METADATA and not func.__name__.startswith("_foreach"):
            was_left = False
            for tensor in tensors_in((args, kwargs)):
                # A view of it may become anything, an array of numpy's too: neither shall see
                # what comes into the memory next.
                if type(tensor) is LazyGrad and has_aliases(tensor):
                    was_left |= keep_apart(tensor)
            if was_left:
                # What was made is over the memory that the gradient has left. What makes views
                # changes no values, so it can be called again.
                with torch._C.DisableTorchFunctionSubclass():
                    result = func(*args, **kwargs)
        return result


def _give_own_memory(grad: LazyGrad) -> None:
    """Leaves the memory that is on the wire to the update, which still needs it."""
    with torch._C.DisableTorchFunctionSubclass():
        memory = torch.empty_like(grad.data)
    move_apart(grad, memory)


def move_apart(grad: LazyGrad, memory: torch.Tensor) -> None:
    """Gives ``grad``, and all views of it, ``memory`` for their own."""
    _move(grad, memory)
    free(grad)


def lazy_over(memory: torch.Tensor) -> LazyGrad:
    """A lazy gradient that is the elements of ``memory``; its owner is still to be set."""
    over = _over(memory)
    lazy: LazyGrad = torch.Tensor._make_subclass(LazyGrad, over)
    lazy.storage_id = over.untyped_storage()._cdata
    return lazy


def point(grad: LazyGrad, memory: torch.Tensor) -> None:
    """Makes ``grad`` the elements of ``memory``."""
    over = _over(memory)
    with torch._C.DisableTorchFunctionSubclass():
        grad.data = over
    grad.storage_id = over.untyped_storage()._cdata


def _over(memory: torch.Tensor) -> torch.Tensor:
    """The elements of ``memory`` as a storage of its own.

    So there is a count of the tensors over it, and it can get other memory together with them.
    """
    flat = memory.as_strided((memory.numel(),), (1,))
    over = torch._C._from_dlpack(torch._C._to_dlpack(flat))
    over.set_(over.untyped_storage(), 0, memory.shape, memory.stride())
    return over


def moves_alone(grad: torch.Tensor) -> bool:
    """True if other tensors over the memory of ``grad`` stay there when it gets another."""
    return not _CAN_SWAP and grad.device.type != "cpu"


def _move(grad: LazyGrad, memory: torch.Tensor) -> None:
    """Gives ``grad`` the memory of ``memory``, with all tensors over its own; see `moves_alone`."""
    has_others = has_aliases(grad)
    with torch._C.DisableTorchFunctionSubclass():
        storage: Any = grad.untyped_storage()
        other = memory.untyped_storage()
        if moves_alone(grad):
            grad.data = memory
        elif storage.nbytes() == other.nbytes() and _CAN_SWAP:
            storage._swap_data_ptr_(other)
        elif has_others and storage.nbytes():
            # What is shared with other processes is copied first, and the storage, with all its
            # tensors, is the copy from then on.
            storage.share_memory_()
        else:
            grad.data = memory


def has_own_memory(grad: LazyGrad) -> bool:
    """True if ``grad`` was zeroed while its memory was on the wire, and has other memory now."""
    return grad.synchronize is _nothing


def plain(grad: torch.Tensor) -> torch.Tensor:
    """The same memory as an ordinary tensor; does not wait."""
    if type(grad) is not LazyGrad:
        return grad
    with torch._C.DisableTorchFunctionSubclass():
        return torch.Tensor.as_subclass(grad, torch.Tensor)


def keep_apart(grad: LazyGrad) -> bool:
    """Gives ``grad``, and all views of it, a copy of its values for good.

    Nothing must be on the wire. What has memory of its own keeps it. Returns true where views of it
    were left over the old memory: they are to be made again.
    """
    grad.is_kept = True
    if has_own_memory(grad):
        return False
    # Inside a transform of torch.func a copy would be a tensor of the transform.
    with torch._C.DisableTorchFunctionSubclass(), temporarily_clear_interpreter_stack():
        is_ours = grad.untyped_storage()._cdata == grad.storage_id
        if is_ours:
            _move(grad, grad.data.clone())
    free(grad)
    return is_ours and moves_alone(grad)


def free(grad: LazyGrad) -> None:
    """Lets go of whoever owned the memory of ``grad``: from now on it never waits."""
    grad.synchronize = _nothing
    grad.is_taken = _false


def settle(grad: LazyGrad) -> None:
    """Makes ``grad`` an ordinary tensor, for all who refer to it; nothing of it is outstanding."""
    for name in LazyGrad.__annotations__:
        vars(grad).pop(name, None)
    grad.__class__ = torch.Tensor  # type: ignore[assignment]


def _nothing() -> None:
    pass


def _false() -> bool:
    return False


def has_aliases(tensor: torch.Tensor) -> bool:
    """True if there are other tensors over the memory of ``tensor``; does not wait for it."""
    with torch._C.DisableTorchFunctionSubclass():
        storage = tensor.untyped_storage()
        # One of them is ``storage`` itself.
        return torch._C._storage_Use_Count(storage._cdata) > 2


#: These give away an address.
_EXPORTS = frozenset(
    {
        torch.Tensor.__array__,
        torch.Tensor.__dlpack__,
        torch.Tensor.data_ptr,
        torch.Tensor.numpy,
        torch.Tensor.share_memory_,
        torch.Tensor.storage,
        torch.Tensor.untyped_storage,
    }
)
_ZEROING = frozenset({torch.Tensor.zero_, torch._foreach_zero_})
#: A copy, a pickle or a print of a gradient is one of an ordinary tensor.
_AS_PLAIN = frozenset(
    {
        torch.Tensor.__deepcopy__,
        torch.Tensor.__format__,
        torch.Tensor.__reduce_ex__,
        torch.Tensor.__repr__,
    }
)


def ready(values: Any) -> None:
    """Waits for every tensor among ``values``, which may be nested, that is outstanding."""
    # Not by `tensors_in`: this is in front of every message between ranks.
    kind = type(values)
    if kind is PendingParameter:
        synchronize_now(values)
    elif kind is LazyGrad:
        values.synchronize()
    elif kind is PendingGrad:
        values.sum_.settle()
    elif isinstance(values, (list, tuple)):
        for value in values:
            ready(value)
    elif isinstance(values, dict):
        for value in values.values():
            ready(value)
