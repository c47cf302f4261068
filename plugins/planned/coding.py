"""Compression: gradients that travel in a smaller dtype than their own.

As DDP's hooks do that compress: rounded first, and divided by the ranks then.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import torch

from ..update.surroundings import unseen
from .buckets import Sent

#: what floating-point gradients travel in, by the setting
DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(slots=True)
class _Coded:
    """What a chunk was made from that has memory of its own on the wire."""

    #: its memory in the bucket
    plain: torch.Tensor
    #: its sum is to come back
    is_out: bool = False


class Coding:
    """Brings chunks into the wire's dtype, and their sums back into buckets.

    Args:
        divisor: of what is sent; 1: the wire divides.
    """

    def __init__(self, dtype: torch.dtype, divisor: int) -> None:
        self._dtype = dtype
        self._divisor = divisor

    def open(self, chunks: Iterable[Sent]) -> None:
        """What is sent of ``chunks`` is of the wire's dtype, in memory that they keep. Idempotent.

        Those that have that dtype already, and complex ones, are sent from the bucket.
        """
        for chunk in chunks:
            if chunk.sent.is_floating_point() and chunk.sent.dtype != self._dtype:
                chunk.coded = _Coded(chunk.sent)
                with unseen():
                    chunk.sent = torch.empty_like(chunk.sent, dtype=self._dtype)

    def encode(self, chunk: Sent) -> None:
        """``chunk`` is about to be issued: what is sent of it has this rank's share of the mean."""
        coded: _Coded | None = chunk.coded
        with unseen():
            if coded is not None:
                chunk.sent.copy_(coded.plain)
                coded.is_out = True
            if self._divisor != 1:
                chunk.sent.div_(self._divisor)

    def decode(self, chunk: Sent) -> None:
        """The calling thread has waited for ``chunk``: the bucket has its sum. Idempotent.

        A sum comes back once, and what has changed it since stays. `Sending.alone` orders what uses
        the bucket on another stream behind it.
        """
        coded: _Coded | None = chunk.coded
        if coded is None or not coded.is_out:
            return
        with unseen():
            # Again, as a signal handler may have been quicker.
            if coded.is_out:
                coded.plain.copy_(chunk.sent)
                coded.is_out = False

    def __repr__(self) -> str:
        return f"<Coding: {self._dtype}>"


def coding_of(compression: str, divisor: int) -> Coding | None:
    """What the setting asks for; None: gradients are sent as they are."""
    dtype = DTYPES.get(compression)
    return None if dtype is None else Coding(dtype, divisor)
