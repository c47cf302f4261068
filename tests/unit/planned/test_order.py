"""What comes after what in a planned DDP: over a wire that sums late, and streams that only order.

Every script has the numbers of a plain run, and no operation reads or writes what nothing has
ordered before it. Each wait, taken out, is found by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from fake_cuda import CUDA, FakeStream, fake_cuda
from fake_wire import FakeWire, Order, Run, alone, inputs, mlp
from torch import Tensor, nn

from bytesched.plugins.planned import session, source, updates
from bytesched.plugins.planned.buckets import Bucket, Member
from bytesched.plugins.planned.sending import Sending
from bytesched.plugins.planned.session import PlannedSession
from bytesched.plugins.planned.updates import Updates

Script = Callable[[Run], object]


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with alone():
        yield


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with fake_cuda():
        yield


# -- scripts ---------------------------------------------------------------------------


def usual(run: Run) -> None:
    run.train(4)


def zeroed(run: Run) -> None:
    run.train(4, set_to_none=False)


def zeroed_without_a_step(run: Run) -> None:
    run.train(2, set_to_none=False)
    run.backward()
    run.optimizer.zero_grad(set_to_none=False)
    run.train(set_to_none=False)


def gradients(run: Run) -> Iterator[Tensor]:
    return (grad for p in run.model.parameters() if (grad := p.grad) is not None)


def read_before_the_step(run: Run) -> None:
    for _ in range(4):
        run.optimizer.zero_grad()
        run.backward()
        run.see(*list(gradients(run))[:2])
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
        run.optimizer.step()


def read_after_the_step(run: Run) -> None:
    for _ in range(4):
        run.train()
        run.see(run.model.module[2].weight, *gradients(run))


def written_again_without_a_step(run: Run) -> None:
    run.train(2)
    for _ in range(3):
        run.optimizer.zero_grad()
        run.backward()
    run.optimizer.step()


def accumulated(run: Run) -> None:
    run.train(2)
    for _ in range(2):
        run.optimizer.zero_grad()
        with run.model.no_sync():
            run.backward()
        run.backward()
        run.backward()
        run.optimizer.step()


def a_regulariser_between(run: Run) -> None:
    for _ in range(4):
        run.optimizer.zero_grad()
        run.backward()
        sum(p.square().sum() for p in run.model.parameters()).backward()
        run.optimizer.step()


def the_module_beside(run: Run) -> None:
    """Of the same weights, outside of DDP: a forward pass, and a backward pass through it."""
    for step in range(4):
        run.train()
        out = run.model.module(inputs(step))
        run.see(out)
        run.optimizer.zero_grad()
        run.backward()
        run.model.module[3](torch.ones(4, 16)).sum().backward()
        run.optimizer.step()


def weights_by_hand(run: Run) -> None:
    for _ in range(4):
        run.train()
        run.see(run.model.module[0].weight.norm(), nn.functional.tanh(run.model.module[3].bias))


def kept(run: Run) -> None:
    """Gradients of three rounds, read when all of them are over."""
    lists = []
    for _ in range(5):
        run.train()
        lists.append(list(gradients(run)))
    for grads in lists:
        run.see(*grads)


def aliased(run: Run) -> None:
    """The script has tensors over the memory of gradients, which wait for nothing."""
    run.train(2, set_to_none=False)
    flat = [grad.view(-1) for grad in gradients(run)]
    for _ in range(2):
        run.optimizer.zero_grad(set_to_none=False)
        run.backward()
        run.see(*flat)
        run.optimizer.step()


def evaluated(run: Run) -> None:
    for step in range(4):
        run.train()
        run.model.eval()
        with torch.no_grad():
            run.see(run.model(inputs(step)))
        run.model.train()


def stepped_twice(run: Run) -> None:
    run.train(3)
    run.optimizer.step()
    run.train()
    for group in run.optimizer.param_groups:
        group["lr"] *= 0.5
    run.optimizer.step()


SCRIPTS: tuple[Script, ...] = (
    *(usual, zeroed, zeroed_without_a_step, read_before_the_step, read_after_the_step),
    *(written_again_without_a_step, accumulated, a_regulariser_between, the_module_beside),
    *(weights_by_hand, kept, aliased, evaluated, stepped_twice),
)


# -- runs ------------------------------------------------------------------------------


@dataclass
class Case:
    """A script, and what it is run with."""

    script: Script
    #: ``gradient_as_bucket_view``
    view: bool = False
    make: Callable[[], nn.Module] = mlp
    #: "gloo" or "nccl"
    wire: str = "gloo"
    #: of the chunks, once there are two rounds; None: as they become ready
    plan: Callable[[int], list[int]] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def run(self) -> list[str]:
        """What is wrong with it, in words."""
        order = Order()
        options: dict[str, Any] = {"make": self.make, "ddp": {"gradient_as_bucket_view": self.view}}
        options |= self.options
        run = Run(FakeWire(self.wire, order=order), order, **options)
        plain = Run(**options)
        if self.plan is not None:
            run.plan_when_settled(self.plan)
        found = []
        try:
            with order.watching():
                self.script(run)
            self.script(plain)
            found = run.differences(plain)
            if not order.found and not found:
                assert run.crossed, "nothing was crossed: that proves nothing"
        except Exception as error:  # noqa: BLE001 - which one is what is asked
            found = [f"{type(error).__name__}: {error}"]
        finally:
            run.close()
        return [*order.found, *found]


def forth(count: int) -> list[int]:
    return list(range(count))


def back(count: int) -> list[int]:
    """All of them wait for the last hook."""
    return forth(count)[::-1]


def by_turns(count: int) -> list[int]:
    """Each second one is issued in the hook of a later bucket."""
    return [*range(1, count, 2), *range(0, count, 2)]


PLANS = {"as ready": None, "forth": forth, "back": back, "by turns": by_turns}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("view", [False, True], ids=["own", "view"])
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_a_script_has_the_numbers_of_a_plain_run_and_an_order(
    script: Script, view: bool, plan: str
) -> None:
    assert Case(script, view, plan=PLANS[plan]).run() == []
