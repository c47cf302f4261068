"""What the demo trains, and examples: a character GPT on the sources of the standard library."""

from __future__ import annotations

import copy
import sysconfig
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from ..bench.link import all_reduces_s
from ..bench.rank import Ranks
from ..bench.workloads.models import GPT

LENGTH = 64
_TEXT_BYTES = 4 << 20
_LARGEST_BATCH = 64
_PROBES, _PROBE_BATCH = 4, 4
#: of this process
_batches: list[int] = []


def character_gpt() -> tuple[nn.Module, Callable[[nn.Module, int], Tensor]]:
    """For `bytesched bench --model`; collective when it is first called.

    The batch is such that its computation takes about as long as sending the gradients.
    """
    model = GPT(256, LENGTH, width=192, depth=6, heads=4)
    text = source_tokens()
    if not _batches:
        _batches.append(_choose_batch(copy.deepcopy(model), text))
    [batch] = _batches

    def loss(module: nn.Module, seed: int) -> Tensor:
        return module(sample(text, batch, seed))  # type: ignore[no-any-return]

    return model, loss


def _choose_batch(model: nn.Module, text: Tensor) -> int:
    ranks = Ranks()
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    sending_s = min(all_reduces_s(nbytes, _PROBES))
    computing_s = []
    for step in range(_PROBES):
        start_s = time.perf_counter()
        model(sample(text, _PROBE_BATCH, step)).backward()
        computing_s.append(time.perf_counter() - start_s)
    fitting: float = ranks.gather(_PROBE_BATCH * sending_s / min(computing_s[1:]))[0]
    batch = max(2, min(_LARGEST_BATCH, round(fitting)))
    ranks.say(f"{nbytes / 1e6:.1f} MB of gradients per iteration, batch of {batch} per host")
    return batch


def sample(text: Tensor, batch: int, seed: int) -> Tensor:
    """A batch: pieces of the text."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - LENGTH - 1, (batch, 1), generator=generator)
    return text[starts + torch.arange(LENGTH + 1)]


@cache
def source_tokens() -> Tensor:
    """The Python sources of this machine's standard library, up to some megabytes, a byte each."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) > _TEXT_BYTES:
            break
    return torch.frombuffer(text, dtype=torch.uint8).long()
