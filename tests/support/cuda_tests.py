"""What tests on a GPU have in common."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

# The ranks are forked from a server that has imported torch: it must not open the driver.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

ON_CUDA = [
    pytest.mark.gpu,
    pytest.mark.procs,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
needs_nccl = pytest.mark.skipif(not dist.is_nccl_available(), reason="needs torch with NCCL")
