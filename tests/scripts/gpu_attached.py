"""Sessions of one rank on a CUDA device, where `wrap` would leave training as it is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

from bytesched.config import Config
from bytesched.plugins.c10d import ddp
from bytesched.plugins.planned.session import PlannedSession


@contextlib.contextmanager
def attached(
    optimizer: torch.optim.Optimizer, model: nn.Module, **fields: Any
) -> Iterator[PlannedSession]:
    """`wrap` without its shortcuts: a world of one is scheduled, too."""
    with mock.patch.object(ddp, "why_plain", return_value=""):
        session = ddp.begin(optimizer, model, Config.load(**fields), is_configured=True)
    assert session is not None
    try:
        yield session
        session.flush()
    finally:
        session.close()
