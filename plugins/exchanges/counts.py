"""What ranks tell each other before they send: who sends how much to whom, and in which form.

Every rank learns everything, so all come to the same verdict: either all send, or all raise.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from bytesched.errors import MismatchError

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Form:
    """What must be the same on all ranks, but for ``trains``.

    ``layer`` is the number of a layer of the ranks, or 0; ``wrong`` whether this rank cannot send.
    ``trains`` is whether what this rank computes with rows has parameters that need gradients, and
    ``records`` whether it records them for a backward pass.
    """

    dtype: int
    width: int
    needs_gradient: bool
    most_pieces: int
    piece_bytes: int
    wrong: bool = False
    layer: int = 0
    trains: bool = field(default=False, compare=False)
    records: bool = field(default=True, compare=False)

    @staticmethod
    def of(
        x: Tensor,
        most_pieces: int = 1,
        piece_bytes: int = 1,
        *,
        wrong: bool = False,
        layer: int = 0,
        trains: bool = False,
    ) -> Form:
        """The form of rows ``x``."""
        known = x.dtype in _DTYPES and x.dim() == 2
        return Form(
            dtype=_DTYPES.index(x.dtype) if known else -1,
            width=x.shape[1] if known else -1,
            needs_gradient=x.requires_grad and torch.is_grad_enabled(),
            most_pieces=most_pieces,
            piece_bytes=piece_bytes,
            wrong=wrong or not known,
            layer=layer,
            trains=trains and torch.is_grad_enabled(),
            records=torch.is_grad_enabled(),
        )

    def __str__(self) -> str:
        dtype = str(_DTYPES[self.dtype]) if self.dtype >= 0 else "no floating-point matrix"
        gradient = "with gradient" if self.needs_gradient else "without gradient"
        limits = f"at most {self.most_pieces} pieces of {self.piece_bytes} bytes"
        where = f" in layer {self.layer}" if self.layer else ""
        return f"{dtype} of width {self.width} {gradient}, {limits}{where}"


@dataclass(frozen=True)
class Table:
    """Of every rank, by rank: its form, and its counts as it gave them."""

    forms: tuple[Form, ...]
    counts: tuple[tuple[int, ...], ...]

    def check_forms(self) -> None:
        """Raises MismatchError, on all ranks alike, if one cannot send or has another form."""
        for rank, form in enumerate(self.forms):
            if form.wrong or min(self.counts[rank], default=0) < 0:
                raise MismatchError(
                    f"rank {rank} of the exchange has rows and counts that do not fit "
                    f"({form}; counts {list(self.counts[rank])}): nothing was sent"
                )
            first, other = len(self.counts[0]), len(self.counts[rank])
            if form != self.forms[0] or first != other:
                lengths = "" if first == other else f", and {other} counts in place of {first}"
                raise MismatchError(
                    f"the ranks of the exchange disagree: rank 0 has {self.forms[0]}, "
                    f"rank {rank} has {form}{lengths}: nothing was sent"
                )

        if self.trains and (without := [r for r, f in enumerate(self.forms) if not f.records]):
            raise MismatchError(
                f"rank {without[0]} of the exchange computes without gradients, and others train "
                "experts, which wait for its backward pass: nothing was sent"
            )

    @property
    def trains(self) -> bool:
        """Whether gradients of rows are needed on some rank."""
        return any(form.trains for form in self.forms)

    def check_sizes(self) -> None:
        """Raises MismatchError if a rank awaits other sizes than are sent.

        Counts are what a rank sends to each, then what it awaits from each.
        """
        size = len(self.counts)
        for sender, row in enumerate(self.counts):
            for receiver in range(size):
                awaited = self.counts[receiver][size + sender]
                if row[receiver] != awaited:
                    raise MismatchError(
                        f"the ranks disagree about sizes: rank {sender} of the exchange sends "
                        f"{row[receiver]} rows to rank {receiver}, which awaits {awaited}: "
                        "nothing was sent"
                    )
