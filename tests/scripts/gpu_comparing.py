"""Jobs that train with everything on a CUDA device."""

from __future__ import annotations

import importlib
import os
import shutil
from typing import Any

import torch
from levels_scripts import HostsJob
from restless import RestlessJob
from scripts_optimizers import SPLITTABLE
from torch import Tensor, nn
from torch.utils._triton import has_triton
from training import Job

#: which several ranks may share
DEVICE = torch.device("cuda", 0)


class CudaJob(Job):
    def record_state(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        assert {p.device for p in model.parameters()} == {DEVICE}
        super().record_state(model, *optimizers)

    def ddp(self, module: nn.Module, **arguments: Any) -> Any:
        # Otherwise products on several streams may round differently from run to run.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
        return super().ddp(module.to(DEVICE), **arguments)

    def inputs(self, step: int, *shape: int) -> Tensor:
        return super().inputs(step, *shape).to(DEVICE)


class RestlessCudaJob(CudaJob, RestlessJob):
    """One whose wrapped run has other sizes, policies and orders after every step or two."""


class HostsCudaJob(HostsJob, CudaJob):
    """One of ranks that believe to share hosts."""


def why_not_here(name: str) -> str:
    kind, arguments = SPLITTABLE[name]
    parameter = nn.Parameter(torch.ones(2, device=DEVICE))
    parameter.grad = torch.ones(2, device=DEVICE)
    try:
        kind([parameter], **arguments).step()
    except RuntimeError as error:
        return str(error)
    return ""


def why_not_compiled() -> str:
    # In this process: those of a pool would be forked from one that has opened the driver.
    importlib.import_module("torch._inductor.config").compile_threads = 1  # type: ignore[attr-defined]
    if not has_triton():
        return "there is no Triton"
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        return "Triton has no C compiler"
    return ""
