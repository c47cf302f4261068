"""Ranks over NCCL that share one device, as those of `bytesched bench --gpu-ranks` do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from gpu_nccl_ranks import on_one_device
from ranks import Ranks, address_of

T = TypeVar("T")


class NcclRanks(Ranks):
    """A pool of ranks whose default process group is NCCL's.

    Args:
        variables: of the environment of each of them, from `mps`.
    """

    def __init__(self, world_size: int, variables: dict[str, str]) -> None:
        super().__init__(world_size)
        self._variables = variables

    def run(self, case: Callable[..., T], *args: object, timeout_s: float = 150.0) -> list[T]:
        """What `case(*args)` returned on each rank. Raises `RankFailure` if it did not on one."""
        return super().run(
            on_one_device, self._variables, address_of(case), args, timeout_s=timeout_s
        )
