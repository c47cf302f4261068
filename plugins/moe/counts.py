"""What ranks tell each other before they send: who sends how much to whom, and in which form.

Every rank learns everything, so all come to the same verdict: either all send, or all raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from bytesched.errors import MismatchError

__all__ = ["Call", "Form", "Table", "Training"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Call(IntEnum):
    """What a rank is about to do."""

    EXCHANGE = 0
    LAYER = 1
    NORM = 2


class Training(IntEnum):
    """What this rank's experts do in a backward pass."""

    UNRECORDED = 0
    FROZEN = 1
    TRAINED = 2


@dataclass(frozen=True)
class Form:
    """What must be the same on all ranks, but for the last two.

    Args:
        layer: its number among those that were made over the group, from 1; 0 for none.
        training: some ranks' experts may be frozen.
        wrong: this rank cannot send.
    """

    call: Call
    layer: int = 0
    dtype: int = -1
    width: int = -1
    needs_gradient: bool = False
    most_pieces: int = 1
    piece_bytes: int = 1
    training: Training = Training.UNRECORDED
    wrong: bool = False

    @staticmethod
    def of(
        x: Tensor,
        call: Call,
        *,
        layer: int = 0,
        most_pieces: int = 1,
        piece_bytes: int = 1,
        training: Training = Training.UNRECORDED,
        wrong: bool = False,
    ) -> Form:
        """The form of rows ``x``."""
        known = x.dtype in _DTYPES and x.dim() == 2
        return Form(
            call,
            layer,
            dtype=_DTYPES.index(x.dtype) if known else -1,
            width=x.shape[1] if known else -1,
            needs_gradient=x.requires_grad and torch.is_grad_enabled(),
            most_pieces=most_pieces,
            piece_bytes=piece_bytes,
            training=training,
            wrong=wrong or not known,
        )

    @staticmethod
    def read(row: Sequence[int]) -> Form:
        """What `row` has made of one."""
        call, layer, dtype, width, needs_gradient, pieces, piece_bytes, training, wrong = row
        return Form(
            Call(call),
            layer,
            dtype,
            width,
            bool(needs_gradient),
            pieces,
            piece_bytes,
            Training(training),
            bool(wrong),
        )

    def row(self) -> list[int]:
        """As numbers."""
        return [*self._compared(), int(self.training), int(self.wrong)]

    def fits(self, other: Form) -> bool:
        """Whether two ranks can do this together."""
        return self._compared() == other._compared()

    def _compared(self) -> list[int]:
        return [
            int(self.call),
            self.layer,
            self.dtype,
            self.width,
            int(self.needs_gradient),
            self.most_pieces,
            self.piece_bytes,
        ]

    @property
    def place(self) -> str:
        """Where in a script the rank is."""
        if self.call is Call.EXCHANGE:
            return "moe.exchange()"
        if self.call is Call.NORM:
            return f"clip_grad_norm_() of MoE layer {self.layer}"
        return f"MoE layer {self.layer}"

    def __str__(self) -> str:
        dtype = str(_DTYPES[self.dtype]) if self.dtype >= 0 else "no floating-point matrix"
        gradient = "with gradient" if self.needs_gradient else "without gradient"
        limits = f"at most {self.most_pieces} pieces of {self.piece_bytes} bytes"
        return f"{dtype} of width {self.width} {gradient}, {limits}"


@dataclass(frozen=True)
class Table:
    """Of every rank, by rank: its form, and its counts as it gave them."""

    forms: tuple[Form, ...]
    counts: tuple[tuple[int, ...], ...]

    @property
    def is_differentiated(self) -> bool:
        """Whether a backward pass of some rank sends gradients, so that all must."""
        return any(f.needs_gradient or f.training is Training.TRAINED for f in self.forms)

    def check_forms(self) -> None:
        """Raises MismatchError, on all ranks alike, if one cannot send or has another form."""
        first = self.forms[0]
        for rank, form in enumerate(self.forms):
            if (form.call, form.layer) != (first.call, first.layer):
                raise MismatchError(
                    f"the ranks disagree about what comes next: rank 0 of the group is in "
                    f"{first.place}, rank {rank} is in {form.place} (layers are numbered as they "
                    "were made over this group): nothing was sent; call the same layers in the "
                    "same order on all ranks, also where a rank has no tokens"
                )
        for rank, form in enumerate(self.forms):
            if form.wrong:
                raise MismatchError(
                    f"rank {rank} of the exchange has rows and counts that do not fit "
                    f"({form}; counts {list(self.counts[rank])}): nothing was sent"
                )
            if not form.fits(first):
                raise MismatchError(
                    f"the ranks of the exchange disagree: rank 0 has {first}, "
                    f"rank {rank} has {form}: nothing was sent"
                )
            if len(self.counts[rank]) != len(self.counts[0]):
                raise MismatchError(
                    f"the ranks disagree about the number of experts: in {form.place} rank 0 has "
                    f"{len(self.counts[0])}, rank {rank} has {len(self.counts[rank])}: nothing "
                    "was sent"
                )
            if self.is_differentiated and self._is_unrecorded(form):
                raise MismatchError(
                    f"in {form.place} rank {rank} computes without gradients (torch.no_grad() or "
                    "inference_mode()) while experts of another rank are trained, whose backward "
                    "pass would wait for it: nothing was sent"
                )

    def _is_unrecorded(self, form: Form) -> bool:
        return form.call is Call.LAYER and form.training is Training.UNRECORDED

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
