"""Ranks that disagree: on the model, on the settings, on what to do in a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from faults_cases import (
    FAULT_STEP,
    FAULTS,
    STEPS,
    TIMEOUT_S,
    Script,
    before,
    inputs,
    named,
    net,
    sgd,
    threads,
    told,
    wrap,
)
from faults_runner import tell
from rank_worker import signals
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import bytesched


def different_models(kind: str) -> None:
    model: nn.Module = net()
    optimizer: torch.optim.Optimizer = sgd(model)
    if dist.get_rank() == 1:
        if kind == "layers":
            model = nn.Sequential(net(), nn.Linear(16, 2))
        elif kind == "shape":
            model.register_parameter("extra", nn.Parameter(torch.zeros(3)))
        elif kind == "dtype":
            model = model.double()
        elif kind == "frozen":
            next(model.parameters()).requires_grad_(False)
        optimizer = torch.optim.Adam(model.parameters()) if kind == "optimizer" else sgd(model)
    told(lambda: wrap(optimizer, model))


def different_settings(fields: dict[str, Any]) -> None:
    """`wrap` with these keywords on rank 1; the environment may differ as well."""
    model = net()
    told(lambda: wrap(sgd(model), model, **fields if dist.get_rank() else {}))


def one_cannot_wrap(who: int, fields: dict[str, Any]) -> None:
    """Rank `who` gives `wrap` fields with which it refuses or does nothing; and trains on."""
    script = Script()
    mine = fields if dist.get_rank() == who else {}
    told(lambda: script.wrap(**mine))


def one_does_not_wrap(who: int) -> None:
    script = Script()

    def run() -> None:
        if dist.get_rank() != who:
            script.wrap(timeout_s=TIMEOUT_S)
        script.train()

    told(run)


def dies_in_wrap(victim: int) -> None:
    model = net()
    if dist.get_rank() == victim:
        before("bytesched.plugins.c10d.attaching", "broadcast", FAULTS["kill"])
    told(lambda: wrap(sgd(model), model))


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.middle, self.last = (nn.Linear(8, 8) for _ in range(3))
        self.skip = False

    def forward(self, x: Tensor) -> Any:
        x = torch.tanh(self.first(x))
        return self.last(x if self.skip else torch.tanh(self.middle(x)))


def skips_a_layer(who: int, in_step: int) -> None:
    model = Skipping()
    ddp = DistributedDataParallel(model)
    optimizer = sgd(model)
    wrap(optimizer, ddp)

    def train() -> None:
        for step in range(STEPS):
            model.skip = step == in_step and dist.get_rank() == who
            optimizer.zero_grad()
            ddp(inputs(step)).square().mean().backward()
            optimizer.step()
        bytesched.flush()

    told(train)


def ends_early(who: int) -> None:
    script = Script().wrap()
    steps = FAULT_STEP if dist.get_rank() == who else STEPS
    told(lambda: script.train(steps))


def skips_a_batch(who: int) -> None:
    """Rank `who` throws one loss away, so that it is one round short from then on."""

    class Skipped(Exception):
        pass

    def at(moment: str) -> None:
        if moment == "before_backward" and dist.get_rank() == who:
            raise Skipped

    script = Script(at).wrap()

    def train() -> None:
        for script.step in range(STEPS):
            with contextlib.suppress(Skipped):
                script.one_step()
        bytesched.flush()

    told(train)


def corrupts_the_state(who: int) -> None:
    script = Script().wrap()

    def at(moment: str) -> None:
        if moment == "before_backward" and dist.get_rank() == who:
            weight = script.model.first_weight
            script.optimizer.state[weight]["momentum_buffer"] = torch.zeros(3, 5)

    script.at = at
    told(script.train_through)


def catches_in_backward() -> None:
    def at(reached: str) -> None:
        if reached == "in_backward":
            script.at = lambda reached: None
            raise ValueError("boom")

    script = Script(at).wrap()

    def train() -> None:
        for script.step in range(STEPS):
            with contextlib.suppress(ValueError):
                script.one_step()
        bytesched.unwrap(script.optimizer)

    told(train)


def stays_alive(who: int, moment: str) -> None:
    """Rank `who` catches its exception and lives on, but takes no part any more.

    In backward, the other rank has not begun its own: a chunk of rank 0 is on the wire, and
    rank 1 may have begun its part. It unwraps then.
    """
    rank = dist.get_rank()

    def at(reached: str) -> None:
        if rank == who:
            if reached == "after_step":
                signals().set("victim is past step")
            if reached == moment:
                signals().set("victim is past step")
                raise ValueError("boom")
        elif moment == "in_backward" and reached == "before_backward":
            signals().wait("victim is past backward")
        elif moment == "in_update" and reached == "before_last_gradients":
            signals().wait("victim is past step")

    script = Script(at)
    script.hook_user(moment)
    script.wrap()
    if rank != who:
        try:
            told(script.train_through)
        finally:
            signals().set("the other is told")
    with contextlib.suppress(ValueError):
        script.train_through()
    if moment == "in_backward":
        bytesched.unwrap(script.optimizer)
        tell(threads_after_unwrap=threads())
        signals().set("victim is past backward")
    signals().wait("the other is told")


def skips_step(who: int) -> None:
    """Rank `who` throws one step away, which plain DDP does not notice."""

    def weights(*, wrapped: bool) -> list[Tensor]:
        script = Script()
        if wrapped:
            script.wrap()
        for step in range(STEPS):
            script.optimizer.zero_grad()
            script.ddp(inputs(step)).square().mean().backward()
            if step != FAULT_STEP or dist.get_rank() != who:
                script.optimizer.step()
        if wrapped:
            bytesched.unwrap(script.optimizer)
        return script.weights()

    told(lambda: tell(equal=_equal(weights(wrapped=False), weights(wrapped=True))))


def skips_step_of_shard(who: int, drops: str) -> None:
    """Rank `who` throws one step away, or one of its gradients, and the others wait for it.

    After the error its state is missing, which does not look like an empty one.
    """
    script = Script().wrap(shard=True)

    def train() -> None:
        for step in range(STEPS):
            loss = script.ddp(inputs(step)).square().mean()
            script.optimizer.zero_grad()
            loss.backward()
            skips = step == FAULT_STEP and dist.get_rank() == who
            if skips and drops == "gradient":
                script.model.first_weight.grad = None
            if not skips or drops == "gradient":
                script.optimizer.step()
        bytesched.flush()

    try:
        told(train)
    finally:
        with contextlib.suppress(bytesched.BytesschedError):
            bytesched.unwrap(script.optimizer)
        tell(state=_error(script.optimizer.state_dict))


def goes_on_after_an_error(who: int) -> None:
    """Rank `who` dies; the other catches the error, tries everything again, and starts afresh."""

    def at(moment: str) -> None:
        if moment == "after_step" and dist.get_rank() == who:
            signals().set("victim is past step")
            FAULTS["kill"]()
        elif moment == "before_last_gradients" and dist.get_rank() != who:
            signals().wait("victim is past step")

    script = Script(at).wrap()
    kept = {k: v.clone() for k, v in script.model.state_dict().items()}
    with contextlib.suppress(bytesched.BytesschedError):
        script.train()
    attempts: dict[str, Callable[[], object]] = {
        "forward": lambda: script.ddp(inputs(0)),
        "step": script.optimizer.step,
        "flush": lambda: bytesched.flush(script.ddp),
        "state": script.optimizer.state_dict,
        "unwrap": lambda: bytesched.unwrap(script.optimizer),
    }
    for name, attempt in attempts.items():
        tell(**{name: _error(attempt)})
    tell(threads_after_unwrap=threads())
    script.model.load_state_dict(kept)
    script.optimizer.zero_grad()
    script.model(inputs(0)).square().mean().backward()
    script.optimizer.step()
    tell(trained_alone=not _equal(list(kept.values()), list(script.model.parameters())))


def _error(attempt: Callable[[], object]) -> dict[str, object]:
    try:
        attempt()
    except Exception as error:  # noqa: BLE001 - which one is what is asked
        return named(error)
    return {"error": None}


def _equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))
