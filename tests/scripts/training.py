"""Small training scripts run twice on every rank: with plain DDP, and with bytesched on top.

A script is a function of a `Job`. It builds a model and an optimizer as a user would, passes them
through `job.ddp` and `job.wrap`, and records what it sees; `compare` says where the runs differ.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from math import isclose
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from rank_worker import resolve
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import bytesched

STEPS = 7
# Far below the size of one layer, so that every layer is cut and every step has many chunks.
SMALL: dict[str, Any] = {"partition_bytes": 256, "credit_bytes": 512}

Script = Callable[..., None]


class Job:
    """One run of a script on one rank."""

    def __init__(self, *, wrapped: bool, module_alone: bool = False, **fields: Any) -> None:
        self.wrapped = wrapped
        self.records: list[tuple[str, Any]] = []
        self.stats: dict[str, int | float | str] = {}
        self.rank = self.own_rank()
        # Turns with plain DDP have tests of their own.
        self._fields = {**SMALL, "guard": False, **fields}
        self._module_alone = module_alone
        self._optimizers: list[Optimizer] = []
        #: as a session ends with its model
        self.kept: list[Any] = []
        torch.manual_seed(7)

    @staticmethod
    def own_rank() -> int:
        return dist.get_rank()

    @staticmethod
    def barrier() -> None:
        dist.barrier()

    def ddp(self, module: nn.Module, **arguments: Any) -> Any:
        """The module under DDP; itself in a wrapped run that does without DDP."""
        if self.wrapped and self._module_alone:
            return module
        self.kept.append(DistributedDataParallel(module, **arguments))
        return self.kept[-1]

    def begin(self, make: Any, module: Any = None, fields: Any = None, **ddp: Any) -> Any:
        """A model under DDP, an `mlp` if nothing is said, and its optimizer, which is wrapped."""
        model = self.ddp(module if isinstance(module, nn.Module) else (module or mlp)(), **ddp)
        return model, self.wrap(make(model), model, **fields or {})

    def started(self, optimizer: Optimizer, model: nn.Module) -> Any:
        """What a script has before anything is wrapped."""
        return optimizer

    def wrap(self, optimizer: Optimizer, model: nn.Module, **fields: Any) -> Any:
        if self.wrapped:
            same = bytesched.wrap(optimizer, model, **self._fields | fields)
            assert same is optimizer
            self._optimizers.append(optimizer)
        return optimizer

    def inputs(self, step: int, *shape: int) -> Tensor:
        """A batch that differs from rank to rank and from step to step."""
        generator = torch.Generator().manual_seed(1000 * self.rank + step)
        return torch.randn(*(shape or (4, 8)), generator=generator)

    def record(self, name: str, value: Any) -> None:
        self.records.append((name, frozen(value)))

    def record_state(self, model: nn.Module, *optimizers: Optimizer) -> None:
        """Every weight and buffer, and what the optimizers hold."""
        self.record("weights", unprefixed(model.state_dict()))
        for optimizer in optimizers:
            self.record("optimizer", optimizer.state_dict())

    def drop(self) -> None:
        self._optimizers.clear()

    def unwrap(self, optimizer: Optimizer) -> None:
        """Take bytesched off, where it was on."""
        if optimizer in self._optimizers:
            self._optimizers.remove(optimizer)
            self.stats = bytesched.stats(optimizer) | self.stats
            bytesched.unwrap(optimizer)

    def close(self) -> None:
        """Take bytesched off everything, keeping the figures of what was wrapped last."""
        if self._optimizers:
            self.stats |= bytesched.stats(self._optimizers[-1])
        for optimizer in list(self._optimizers):
            self.unwrap(optimizer)


def unprefixed(state: dict[str, Any]) -> dict[str, Any]:
    """A state dict with the keys a module without DDP or compilation would have."""
    return {key.replace("module.", "").replace("_orig_mod.", ""): v for key, v in state.items()}


def frozen(value: Any) -> Any:
    """A deep copy of plain values that later steps cannot change."""
    if isinstance(value, Tensor):
        copied = value.detach().clone()
        return copied if copied.is_sparse else copied.as_subclass(Tensor)
    if isinstance(value, dict):
        return {key: frozen(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [frozen(item) for item in value]
    return value


def as_array(tensor: Tensor) -> Tensor:
    """A copy by way of numpy, which sees memory of the host alone."""
    return torch.from_numpy((tensor.cpu() if tensor.is_cuda else tensor).numpy().copy())


def differences(expected: Any, got: Any, where: str, rtol: float = 0.0) -> Iterator[str]:
    """Where `got` is not `expected`: to the last bit, or to `rtol` if that is not zero."""
    if type(expected) is not type(got):
        yield f"{where}: {type(expected).__name__} became {type(got).__name__}: {got}"
    elif isinstance(expected, Tensor):
        if expected.dtype != got.dtype or expected.shape != got.shape:
            yield f"{where}: {expected.dtype} {expected.shape} became {got.dtype} {got.shape}"
        elif rtol and torch.allclose(expected, got, rtol=rtol, atol=rtol):
            return
        elif not same_bits(expected, got):
            yield f"{where}: {expected.flatten()[:4]} became {got.flatten()[:4]}"
    elif isinstance(expected, dict):
        if expected.keys() != got.keys():
            yield f"{where}: keys {list(expected)} became {list(got)}"
        for key in expected.keys() & got.keys():
            yield from differences(expected[key], got[key], f"{where}.{key}", rtol)
    elif isinstance(expected, list):
        if len(expected) != len(got):
            yield f"{where}: {len(expected)} items became {len(got)}"
        for index, (one, other) in enumerate(zip(expected, got, strict=False)):
            yield from differences(one, other, f"{where}[{index}]", rtol)
    elif (
        rtol and isinstance(expected, float) and isclose(expected, got, rel_tol=rtol, abs_tol=rtol)
    ):
        return
    elif expected != got and expected == expected:
        yield f"{where}: {expected} became {got}"


def same_bits(expected: Tensor, got: Tensor) -> bool:
    """Equality in which NaN equals NaN."""
    if expected.is_sparse:
        expected, got = expected.to_dense(), got.to_dense()
    return torch.equal(expected, got) or bool(
        torch.isclose(expected, got, rtol=0, atol=0, equal_nan=True).all()
    )


def compare(
    script: tuple[str, str],
    args: tuple[Any, ...] = (),
    options: dict[str, Any] | None = None,
    rtol: float = 0.0,
    kind: type[Job] = Job,
) -> tuple[list[str], dict[str, int | float | str]]:
    """Where a wrapped run of `script` differs from a plain one, and the wrapped run's figures.

    `options` are those of the wrapped job, and both are of the class `kind`.
    """
    runs = []
    for wrapped in (False, True):
        job = kind(wrapped=wrapped, **(options or {} if wrapped else {}))
        with contextlib.closing(job):
            resolve(script)(job, *args)
        kind.barrier()
        runs.append(job)
    plain, wrapped_run = runs
    assert plain.records, "a script that records nothing proves nothing"
    names = [name for name, _ in plain.records], [name for name, _ in wrapped_run.records]
    found = list(differences(*names, "recorded"))
    for index, ((name, expected), (_, got)) in enumerate(
        zip(plain.records, wrapped_run.records, strict=False)
    ):
        found += differences(expected, got, f"record {index} {name}", rtol)
    return found, wrapped_run.stats


def train(
    job: Job,
    model: Any,
    optimizer: Optimizer,
    *,
    steps: int = STEPS,
    first_step: int = 0,
    before_step: Callable[[int], object] | None = None,
    after_step: Callable[[int], object] | None = None,
    zero_grad: Callable[[], object] | None = None,
    inputs: Callable[[int], Any] | None = None,
    loss: Callable[[int], Tensor] | None = None,
    passes: Callable[[int], object] | None = None,
    update: Callable[[int], object] | None = None,
) -> None:
    """The usual loop, recording each loss: zero, forward, backward, step, with room in between.

    Args:
        inputs: of a step, if they are not the job's.
        loss: of a step, if it is not the mean of squares of what the model makes of these.
        passes: all forward and backward passes of a step, in place of these.
        update: what is done in place of the optimizer's step().
    """

    def usual(step: int) -> Tensor:
        given: Tensor = loss(step) if loss else model((inputs or job.inputs)(step)).square().mean()
        given.backward()
        return given

    for step in range(first_step, first_step + steps):
        (zero_grad or optimizer.zero_grad)()
        seen = (passes or usual)(step)
        if before_step:
            before_step(step)
        update(step) if update else optimizer.step()
        if after_step:
            after_step(step)
        job.record(f"loss {step}", seen)


def gradients(model: nn.Module) -> list[Any]:
    return [parameter.grad for parameter in model.parameters()]


def backward(job: Job, model: Any, step: int) -> Tensor:
    """The loss of a batch, whose gradients are on their way."""
    loss: Tensor = model(job.inputs(step)).square().mean()
    loss.backward()
    return loss


def closure_of(job: Job, model: Any, optimizer: Optimizer, step: int) -> Callable[[], Tensor]:
    """A backward pass for the optimizer's step() to call."""

    def evaluate() -> Tensor:
        optimizer.zero_grad()
        return backward(job, model, step)

    return evaluate


def script(
    make: Callable[[Any], Optimizer],
    module: Callable[[], nn.Module] | None = None,
    *,
    when: str = "all",
    steps: int = STEPS,
    wraps: bool = True,
    fields: Mapping[str, Any] = MappingProxyType({}),
    shape: tuple[int, ...] = (),
    **arguments: Any,
) -> Callable[[Callable[..., Any]], Script]:
    """Makes a script of a function of the job, a model, its optimizer and what the case gives.

    Args:
        make: the optimizer of a model.
        module: what is put under DDP, with the ``arguments``; else an `mlp`.
        when: the function is "all" of the training, or one "step" of it, or what `train` is to
            call, as "loss", "passes", "before_step", "update" or "after_step"; all but the first
            get the number of the step.
        wraps: else the function wraps the optimizer itself.
        fields: for `Job.wrap`.
        shape: of the batches of that loop.
    """

    def made(function: Callable[..., Any]) -> Script:
        @functools.wraps(function)
        def run(job: Job, *args: Any) -> None:
            model = job.ddp((module or mlp)(), **arguments)
            plain = make(model)
            optimizer = job.wrap(plain, model, **fields) if wraps else job.started(plain, model)

            def act(step: int) -> Any:
                return function(job, model, optimizer, step, *args)

            if when == "all":
                function(job, model, optimizer, *args)
            elif when == "step":
                for step in range(steps):
                    act(step)
            else:
                hooks: dict[str, Any] = {when: act}
                if shape:
                    hooks["inputs"] = lambda step: job.inputs(step, *shape)
                train(job, model, optimizer, steps=steps, **hooks)
            job.record_state(model, optimizer)

        return run

    return made


@contextlib.contextmanager
def listening(level: int = logging.NOTSET) -> Iterator[list[str]]:
    """What bytesched logs inside, as it comes."""
    said: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("bytesched")
    log.addHandler(handler)
    try:
        yield said
    finally:
        log.removeHandler(handler)


def mlp() -> nn.Sequential:
    """Three linear layers and a normalisation: seven chunks or so in a `SMALL` cut."""
    return nn.Sequential(
        nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4)
    )


def sgd(model: nn.Module, **arguments: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9} | arguments)


def adamw(model: nn.Module, **arguments: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), **{"lr": 0.01} | arguments)
