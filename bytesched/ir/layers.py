"""What a model consists of, before anything is split."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["WAYS", "Layer"]

#: how layers are split; see `bytesched.ir.transform`
WAYS = frozenset({"batch", "micro", "column", "row", "feature", "copy"})


@dataclass(frozen=True)
class Layer:
    """A layer of a model, before anything is split."""

    name: str
    #: names of the layers whose outputs it reads
    inputs: tuple[str, ...] = ()
    forward_s: float = 0.0
    backward_s: float = 0.0
    #: of the global batch
    output_bytes: int = 0
    parameter_bytes: int = 0
    #: what an operator of it needs while it runs, beside what it reads and writes
    workspace_bytes: int = 0
    #: how it may be split without other results; see `bytesched.ir.transform`
    ways: frozenset[str] = WAYS
