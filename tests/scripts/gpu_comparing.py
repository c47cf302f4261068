"""Scripts of the other tests, plain and wrapped, with everything on a CUDA device."""

from __future__ import annotations

import importlib
import os
import shutil
from typing import Any

import torch
from levels_scripts import on_named_hosts
from restless import RestlessJob
from scripts_optimizers import SPLITTABLE
from torch import Tensor, nn
from torch.utils._triton import has_triton
from training import Job, compare

#: which several ranks may share
DEVICE = torch.device("cuda", 0)

#: where the runs differ, and the wrapped run's figures
Compared = tuple[list[str], dict[str, int | float | str]]


class CudaJob(Job):
    """A `Job` whose models and batches are on the device."""

    def record_state(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        assert {p.device for p in model.parameters()} == {DEVICE}
        super().record_state(model, *optimizers)

    def ddp(self, module: nn.Module, **arguments: Any) -> Any:
        return super().ddp(module.to(DEVICE), **arguments)

    def inputs(self, step: int, *shape: int) -> Tensor:
        return super().inputs(step, *shape).to(DEVICE)


class RestlessCudaJob(CudaJob, RestlessJob):
    """One whose wrapped run is tuned all the time."""


def compare_on_cuda(
    script: tuple[str, str],
    args: tuple[Any, ...] = (),
    options: dict[str, Any] | None = None,
    kind: type[CudaJob] = CudaJob,
) -> Compared:
    """`training.compare` with everything on the device."""
    # Otherwise products on several streams may round differently from run to run.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = False
    return compare(script, args, options, kind=kind)


def compare_restless(
    script: tuple[str, str], args: tuple[Any, ...] = (), options: dict[str, Any] | None = None
) -> Compared:
    """`compare_on_cuda` with other sizes, policies and orders after every step or two."""
    return compare_on_cuda(script, args, options, RestlessCudaJob)


def compare_on_two_hosts(
    script: tuple[str, str], args: tuple[Any, ...] = (), options: dict[str, Any] | None = None
) -> Compared:
    """`compare_on_cuda` of four ranks that believe to share two hosts."""
    with on_named_hosts([2, 2]):
        return compare_on_cuda(script, args, options)


def why_not_here(name: str) -> str:
    """Why torch cannot run an optimizer on the device; empty if it can."""
    kind, arguments = SPLITTABLE[name]
    parameter = nn.Parameter(torch.ones(2, device=DEVICE))
    parameter.grad = torch.ones(2, device=DEVICE)
    try:
        kind([parameter], **arguments).step()
    except RuntimeError as error:
        return str(error)
    return ""


def why_not_compiled() -> str:
    """Why torch cannot compile for the device; empty if it can."""
    # In this process: those of a pool would be forked from one that has opened the driver.
    importlib.import_module("torch._inductor.config").compile_threads = 1  # type: ignore[attr-defined]
    if not has_triton():
        return "there is no Triton"
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        return "Triton has no C compiler"
    return ""
