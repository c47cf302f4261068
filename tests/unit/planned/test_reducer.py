"""The reducer of a DDP: other buckets, our hook, and scripts that register their own."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_wire import alone, inputs, mlp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bytesched.plugins.planned.reducer import hook, reduced_by, renew, why_not_renewed


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with alone():
        yield


class Hook:
    """Sums nothing; the sizes of the buckets that it has seen."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        self.sizes.append(bucket.buffer().nbytes)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future


def hooked(ddp: DistributedDataParallel) -> tuple[Any, list[str]]:
    seen, aside = Hook(), list[str]()
    made: Any = seen
    made.undo = hook(ddp, made, lambda: aside.append("aside"))
    return seen, aside


def rounds(ddp: Any, count: int = 3) -> None:
    for step in range(count):
        ddp(inputs(step)).sum().backward()


def names_of(ddp: DistributedDataParallel, parameters: list[nn.Parameter]) -> list[str]:
    names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    return sorted(names[id(parameter)] for parameter in parameters)


@pytest.mark.parametrize("view", [False, True])
def test_buckets_are_of_the_size_that_is_asked_for(view: bool) -> None:
    ddp = DistributedDataParallel(mlp(), gradient_as_bucket_view=view)
    renew(ddp, 600)
    seen, _ = hooked(ddp)
    # After the first round DDP makes those that stay.
    rounds(ddp, 2)
    seen.sizes.clear()
    rounds(ddp, 1)
    # Tensors are never cut; there are 1936 bytes, of which one has 1024.
    assert len(seen.sizes) > 1
    assert sum(seen.sizes) == 1936
    renew(ddp, 0)
    seen.sizes.clear()
    rounds(ddp)
    assert not seen.sizes, "a new reducer has no hook"


def test_without_a_size_buckets_are_those_of_ddp() -> None:
    caps = []
    for again in (False, True):
        ddp = DistributedDataParallel(mlp(), bucket_cap_mb=0.0005)
        if again:
            renew(ddp, 600)
            renew(ddp, 0)
        seen, _ = hooked(ddp)
        rounds(ddp)
        caps.append((ddp.bucket_bytes_cap, seen.sizes))
    assert caps[0] == caps[1]
    defaults: Any = dist
    assert defaults._DEFAULT_FIRST_BUCKET_BYTES == 1024 * 1024


def test_the_hook_may_come_with_the_reducer() -> None:
    ddp = DistributedDataParallel(mlp())
    seen, _ = hooked(ddp)
    renew(ddp, 600, seen)
    rounds(ddp, 1)
    assert seen.sizes


def test_what_is_reduced_was_decided_when_ddp_was_made() -> None:
    model: Any = mlp()
    model[2].bias.requires_grad_(False)
    ddp = DistributedDataParallel(model)
    expected = ["0.bias", "0.weight", "2.weight", "3.bias", "3.weight"]
    assert names_of(ddp, reduced_by(ddp)) == expected
    model[2].bias.requires_grad_(True)
    model[0].weight.requires_grad_(False)
    renew(ddp, 600)
    assert names_of(ddp, reduced_by(ddp)) == expected
    # And the script's own choice is as it was.
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert frozen == ["0.weight"]


def test_a_static_graph_stays_one() -> None:
    ddp = DistributedDataParallel(mlp(), static_graph=True)
    rounds(ddp, 1)
    renew(ddp, 600)
    seen, _ = hooked(ddp)
    rounds(ddp)
    assert len(seen.sizes) > 3


def test_gradients_are_what_they_were() -> None:
    plain, ours = DistributedDataParallel(mlp()), DistributedDataParallel(mlp())
    renew(ours, 600)
    hooked(ours)
    for ddp in (plain, ours):
        rounds(ddp, 1)
    for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


def test_a_size_that_the_script_has_chosen_stays() -> None:
    assert why_not_renewed(DistributedDataParallel(mlp())) == ""
    chosen = DistributedDataParallel(mlp(), bucket_cap_mb=1)
    assert why_not_renewed(chosen) == "bucket_cap_mb was given to DDP"


def test_a_hook_of_the_script_makes_us_stand_aside_first() -> None:
    ddp, ours, theirs = DistributedDataParallel(mlp()), Hook(), Hook()
    log: list[str] = []

    def stand_aside() -> None:
        log.append("aside")
        undo()
        renew(ddp, 0)

    source: Any = ours
    undo = hook(ddp, source, stand_aside)
    ddp.register_comm_hook(None, lambda state, bucket: theirs(state, bucket))
    rounds(ddp, 1)
    assert log == ["aside"]
    assert theirs.sizes
    assert not ours.sizes


def test_undone_ddp_has_its_own_methods() -> None:
    ddp = DistributedDataParallel(mlp())
    seen, aside = hooked(ddp)
    assert "register_comm_hook" in vars(ddp)
    seen.undo()
    seen.undo()
    assert "register_comm_hook" not in vars(ddp)
    method: Any = ddp.register_comm_hook
    assert method.__func__ is DistributedDataParallel.register_comm_hook
    assert aside == []


@pytest.mark.parametrize("how", ["copied", "saved"])
def test_a_copy_registers_hooks_of_its_own(how: str) -> None:
    ddp = DistributedDataParallel(mlp())
    seen, aside = hooked(ddp)
    if how == "copied":
        other = copy.deepcopy(ddp)
    else:
        torch.save(ddp, buffer := io.BytesIO())
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    theirs = Hook()
    other.register_comm_hook(None, lambda state, bucket: theirs(state, bucket))
    assert aside == []
    rounds(other, 1)
    assert theirs.sizes
    assert not seen.sizes
