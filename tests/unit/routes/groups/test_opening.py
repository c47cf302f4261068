"""Process groups of our own: of which kind."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from bytesched.plugins.routes.groups.opening import kind_of


@pytest.mark.parametrize(
    ("name", "kind"),
    [("gloo", "gloo"), ("nccl", "nccl"), ("nccl2", "nccl"), ("nccl-lazy", "nccl"), ("mpi", "mpi")],
)
def test_every_engine_of_nccl_is_nccl(name: str, kind: str) -> None:
    base: Any = Mock()
    base._get_backend.return_value.name.return_value = name
    assert kind_of(base, torch.device("cpu")) == kind
    base._get_backend.assert_called_once_with(torch.device("cpu"))
