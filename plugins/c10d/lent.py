"""DDP's own reducer, over the ranks of a session: C++ alone packs and sums for a while."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bytesched.errors import BytesschedError

from ..routes.groups.group import Group

__all__ = ["LentReducer", "requiring_gradients"]

_TASK: Final = "gradients of DDP's own reducer"
#: where it names the parameters that are missing
_MISSING: Final = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")


class LentReducer:
    """See lending.Borrower.

    It sums on the group of the session, whose failures have a deadline and a name, and takes the
    place of the reducer that DDP was left with, which reduces nothing.

    Args:
        reduced: ids of the parameters that DDP reduces.
        group: of Gloo, on which nothing else is sent meanwhile.
    """

    def __init__(
        self, weak_ddp: weakref.ref[DistributedDataParallel], reduced: Set[int], group: Group
    ) -> None:
        self._weak_ddp = weak_ddp
        self._reduced = reduced
        self._group = group
        self._reducer: Any = None

    def borrow(self, parameters: Sequence[nn.Parameter], bucket_bytes: int) -> None:
        ddp = self._weak_ddp()
        assert ddp is not None
        place = {id(parameter): number for number, parameter in enumerate(parameters)}
        with requiring_gradients(ddp, self._reduced), _made_for(ddp, self._group, bucket_bytes):
            known, sparse = ddp._build_params_for_reducer()
            # It fills buckets from the last one on, as backward does, before it has seen one.
            known.sort(key=lambda parameter: place.get(id(parameter), len(place)))
            names = ddp._build_debug_param_to_name_mapping(known)
            ddp._ddp_init_helper(known, sparse, names, False)
        self._reducer = ddp.reducer

    def give_back(self) -> None:
        reducer, self._reducer = self._reducer, None
        if reducer is not None:
            reducer._remove_autograd_hooks()

    def prepare(self) -> None:
        try:
            # As DDP does next: this is collective once, when it knows the order of gradients.
            self._reducer._rebuild_buckets()
        except RuntimeError as error:
            raise self.named(error) or error from error

    def missing(self) -> list[int] | None:
        try:
            self._reducer._check_reducer_finalized()
        except RuntimeError as error:
            found = _MISSING.search(str(error))
            return [] if found is None else [int(number) for number in found[1].split()]
        return None

    def named(self, error: BaseException) -> BytesschedError | None:
        if not isinstance(error, RuntimeError):
            return None
        return self._group.failure(error, task=_TASK)

    def lost(self) -> BytesschedError | None:
        return self._group.lost()


@contextmanager
def requiring_gradients(module: nn.Module, ids: Set[int]) -> Iterator[None]:
    """Inside, the parameters with these ``ids`` require gradients, and no others.

    A DDP reduces what did when it was made, whatever has been frozen or unfrozen since.
    """
    changed = [p for p in module.parameters() if p.requires_grad != (id(p) in ids)]
    for parameter in changed:
        parameter.requires_grad_(not parameter.requires_grad)
    try:
        yield
    finally:
        for parameter in changed:
            parameter.requires_grad_(not parameter.requires_grad)


@dataclass(frozen=True)
class _Buckets:
    """In place of DDP's own sizes, by which the first round has one bucket of everything."""

    first_bucket_bytes_cap: int

    def compute_bucket_size_limits(self, **_: bool) -> tuple[list[int], list[int]]:
        return [self.first_bucket_bytes_cap], []


@contextmanager
def _made_for(ddp: DistributedDataParallel, group: Group, bucket_bytes: int) -> Iterator[None]:
    """Inside, a reducer of ``ddp`` is made for ``group``, and for buckets of this size."""
    kind: Any = dist.ProcessGroup
    processes = kind(group.rank, group.size)
    processes._register_backend(torch.device("cpu"), kind.BackendType.GLOO, group.backend)
    made: dict[str, Any] = {
        "process_group": processes,
        "bucket_bytes_cap": bucket_bytes,
        "_bucket_config": _Buckets(bucket_bytes),
    }
    attributes = ddp.__dict__
    before = {name: attributes[name] for name in made if name in attributes}
    attributes.update({name: made[name] for name in before})
    try:
        yield
    finally:
        attributes.update(before)
