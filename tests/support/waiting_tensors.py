"""What scripts do with a tensor that waits, and an update for it to wait for."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["LOOKS", "USES", "Update", "saved", "unpickled"]


class Update:
    """One that is outstanding until it is settled: then the values are ones."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.calls = 0

    def synchronize(self) -> None:
        self.calls += 1
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            self.values.fill_(1.0)


def saved(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer)


def unpickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))  # noqa: S301 (it has just been made)


#: true if the values are ones by then
USES: dict[str, Callable[[Any], Any]] = {
    "sum": lambda p: p.sum() == 6,
    "arithmetic": lambda p: (2 * p == 2).all(),
    "matmul": lambda p: (torch.ones(1, 2) @ p == 2).all(),
    "in a list": lambda p: (torch.cat([p, p]) == 1).all(),
    "behind one, in Python": lambda p: nn.functional.mse_loss(torch.zeros(2, 3), p) == 1,
    "behind one in a list": lambda p: (torch.block_diag(torch.zeros(1, 1), p)[1:, 1:] == 1).all(),
    "as a keyword": lambda p: (torch.add(torch.zeros(2, 3), other=p) == 1).all(),
    "foreach": lambda p: (torch._foreach_mul([p.detach()], 3.0)[0] == 3).all(),
    "detach": lambda p: (p.detach() == 1).all(),
    "data": lambda p: (p.data == 1).all(),
    "item": lambda p: p[0, 0].item() == 1,
    "numpy": lambda p: (p.detach().numpy() == 1).all(),
    "tolist": lambda p: p.tolist() == [[1.0] * 3] * 2,
    "clone": lambda p: (p.clone() == 1).all(),
    "data_ptr": lambda p: p.data_ptr() > 0,
    "repr": lambda p: "1., 1." in repr(p),
    "deepcopy": lambda p: (copy.deepcopy(p) == 1).all(),
    "pickle": lambda p: (unpickled(p) == 1).all(),
    "save": lambda p: (saved(p) == 1).all(),
    "state_dict": lambda p: (nn.ParameterList([p]).state_dict()["0"] == 1).all(),
    "module": lambda p: (nn.functional.linear(torch.ones(1, 3), p) == 3).all(),
}

#: need no value
LOOKS: dict[str, Callable[[Any], Any]] = {
    "shape": lambda p: p.shape == (2, 3),
    "size": lambda p: p.size() == (2, 3) and p.size(0) == 2,
    "numel": lambda p: p.numel() == 6,
    "len": lambda p: len(p) == 2,
    "dtype": lambda p: p.dtype is torch.float32,
    "device": lambda p: p.device.type == "cpu",
    "stride": lambda p: p.stride() == (3, 1),
    "requires_grad": lambda p: p.requires_grad,
    "is_leaf": lambda p: p.is_leaf,
    "grad": lambda p: p.grad is not None,
    "zero_grad": lambda p: torch.optim.SGD([p]).zero_grad() is None and p.grad is None,
    "hook": lambda p: p.register_hook(lambda grad: None) is not None,
    "isinstance": lambda p: isinstance(p, nn.Parameter),
    "id": lambda p: {p: 1}[p] == 1,
}
