"""The state that this rank holds of a sharded optimizer, for torch.distributed.checkpoint.

Its planner asks objects in a state dict which boxes of a tensor they have (`_Checkpointable`). A
part of a tensor is a range of its memory, which is a few boxes; so each rank writes and reads what
it owns, nothing is sent, and a checkpoint has no trace of the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, TypeAlias

import torch

from bytesched.errors import PluginError

from ..planned.bundles import Slot
from .ownership import Piece
from .states import States

#: names of modules inside wrappers of torch
_WRAPPERS: Final = ("module", "_orig_mod")

#: offsets and sizes along each dimension
_Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


class HeldTensor(torch.Tensor):
    """Boxes of one tensor that are here, as torch's planners want them; it has no memory itself."""

    _pieces: dict[torch.Size, torch.Tensor]

    @staticmethod
    def __new__(cls, like: torch.Tensor, here: Piece, value: torch.Tensor) -> HeldTensor:
        made: HeldTensor = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=value.dtype, device=value.device
        )
        return made

    def __init__(self, like: torch.Tensor, here: Piece, value: torch.Tensor) -> None:
        self._pieces = {}
        # In the order of memory, in which the elements that are here are a range.
        shape, strides = like.shape, like.stride()
        order = sorted(range(len(shape)), key=lambda d: -strides[d])
        back = sorted(range(len(order)), key=order.__getitem__)
        flat = value.as_strided((value.numel(),), (1,))
        at = 0
        for offsets, sizes in boxes_of([shape[d] for d in order], here.start, here.stop):
            piece = flat[at : at + prod(sizes)].view(sizes).permute(back)
            at += prod(sizes)
            self._pieces[torch.Size([offsets[d] for d in back])] = piece

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise TypeError(f"{func} of a tensor that is here in part: it can only be saved and loaded")

    def __create_write_items__(self, fqn: str, _: object) -> list[Any]:
        from torch.distributed.checkpoint import planner
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties

        return [
            planner.WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(self._pieces[chunk.offsets]),
                    size=self.shape,
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(offsets=offsets, sizes=piece.size())
            for offsets, piece in self._pieces.items()
        ]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return self._pieces[index.offset]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        here = sum(piece.numel() for piece in self._pieces.values())
        return f"<HeldTensor {here} elements of {tuple(self.shape)}>"


@dataclass(eq=False, repr=False)
class ShardedState:
    """What `torch.distributed.checkpoint` saves and loads of one optimizer; see `sharded_state`."""

    _optimizer: torch.optim.Optimizer
    _states: States
    #: applies what is outstanding
    _synchronize: Callable[[], None]

    def _held(self) -> Iterator[tuple[Slot, Piece, dict[str, Any]]]:
        self._synchronize()
        if self._states.ownership is None:
            raise PluginError("no rank owns anything before the first backward pass")
        return self._states.here(self._optimizer.state)

    def state_dict(self) -> dict[str, Any]:
        """In the layout of torch's `get_optimizer_state_dict`. Raises PluginError."""
        state = {
            plain_name(slot.name): {
                key: HeldTensor(slot.parameter, here, value)
                if _is_elementwise(slot.parameter, here, value)
                else value
                for key, value in entry.items()
            }
            for slot, here, entry in self._held()
        }
        names = {id(slot.parameter): plain_name(slot.name) for slot in self._states.slots}
        groups = []
        for group in self._optimizer.param_groups:
            unknown = [p for p in group["params"] if id(p) not in names]
            if unknown:
                raise PluginError(
                    f"a parameter of shape {tuple(unknown[0].shape)} is in the optimizer and not "
                    "in the wrapped model: it has no name in a checkpoint of shards; save "
                    "optimizer.state_dict() instead"
                )
            groups.append({**group, "params": [names[id(p)] for p in group["params"]]})
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what was read over; tensors were read in place."""
        for slot, _, entry in self._held():
            for key, value in state_dict["state"].get(plain_name(slot.name), {}).items():
                if not isinstance(value, HeldTensor):
                    entry[key] = value
        for group, loaded in zip(
            self._optimizer.param_groups, state_dict["param_groups"], strict=True
        ):
            group.update({key: value for key, value in loaded.items() if key != "params"})


def boxes_of(shape: Sequence[int], at: int, stop_at: int) -> Iterator[_Box]:
    """Boxes of a tensor of that shape that are together these of its elements, row by row."""
    if not shape:
        yield from [((), ())] * (stop_at - at)
        return
    rows = [prod(shape[d + 1 :]) for d in range(len(shape))]
    while at < stop_at:
        # Along the outermost dimension of which a row begins here, and fits.
        d = next(d for d, row in enumerate(rows) if at % row == 0 and at + row <= stop_at)
        offsets = tuple(at // row % size for row, size in zip(rows, shape, strict=True))
        count = min(shape[d] - offsets[d], (stop_at - at) // rows[d])
        yield offsets, (*(1 for _ in range(d)), count, *shape[d + 1 :])
        at += count * rows[d]


def plain_name(name: str) -> str:
    """The name of a parameter in the model that its user wrote."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _is_elementwise(like: torch.Tensor, here: Piece, value: object) -> bool:
    """Whether ``value`` has one element for each of those of ``like`` that are here."""
    if not isinstance(value, torch.Tensor) or not value.dim():
        return False
    whole = value.shape == like.shape and value.stride() == like.stride()
    return whole or value.shape == (here.numel,)
