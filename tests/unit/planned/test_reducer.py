"""The reducer of a DDP: other buckets, and the gradients that our hook leaves."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_wire import Run, inputs, mlp
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

from bytesched.plugins.planned import ddp_session
from bytesched.plugins.planned.reducer import hook, reduced_by, renew, why_not_renewed

pytestmark = pytest.mark.usefixtures("group")


class Hook:
    """Sums nothing; the sizes of the buckets that it has seen."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        self.sizes.append(bucket.buffer().nbytes)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future


def hooked(ddp: DistributedDataParallel) -> Any:
    made: Any = Hook()
    hook(ddp, made, lambda: None)
    return made


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
    seen = hooked(ddp)
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
        seen = hooked(ddp)
        rounds(ddp)
        caps.append((ddp.bucket_bytes_cap, seen.sizes))
    assert caps[0] == caps[1]
    defaults: Any = dist
    assert defaults._DEFAULT_FIRST_BUCKET_BYTES == 1024 * 1024


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


def test_a_size_that_the_script_has_chosen_stays() -> None:
    assert why_not_renewed(DistributedDataParallel(mlp())) == ""
    chosen = DistributedDataParallel(mlp(), bucket_cap_mb=1)
    assert why_not_renewed(chosen) == "bucket_cap_mb was given to DDP"


def backward(run: Run, *, set_to_none: bool = True) -> list[torch.Tensor]:
    """One round without an update; its gradients."""
    run.optimizer.zero_grad(set_to_none=set_to_none)
    run.backward()
    return [parameter.grad for parameter in run.model.parameters()]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("keeps_local", [False, True])
def test_gradients_have_the_bits_of_ddp(
    run_of: Callable[..., Run],
    monkeypatch: pytest.MonkeyPatch,
    keeps_local: bool,
    view: bool,
    set_to_none: bool,
) -> None:
    """Three is no power of two: DDP multiplies what it copies, and divides what lies there."""
    if not keeps_local:
        monkeypatch.setattr(ddp_session, "keep_local", lambda ddp: False)
    ours, plain = run_of(0, size=3, ddp={"gradient_as_bucket_view": view}), Run()
    for number in range(4):
        is_divided = view and not set_to_none and number > 0
        found = backward(ours, set_to_none=set_to_none)
        assert bool(ours.pending) is (number > 1)
        for mine, theirs in zip(found, backward(plain), strict=True):
            expected = theirs.div(3) if is_divided else theirs.mul(1 / 3)
            assert torch.equal(mine, expected.mul(3))


def test_ddp_does_not_copy_what_is_not_summed(
    run_of: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass over all gradients; whoever reads them gets the sums."""
    copies = []
    for keeps_local in (True, False):
        if not keeps_local:
            monkeypatch.setattr(ddp_session, "keep_local", lambda ddp: False)
        ours = run_of(2)
        with torch.profiler.profile() as profiled:
            ours.train()
        assert len(ours.pending) == len(ours.slots)
        copies.append(sum(one.count for one in profiled.key_averages() if one.key == "aten::copy_"))
    assert copies[1] - copies[0] == len(ours.slots)


def test_a_gradient_that_a_hook_has_taken_is_made_by_ddp(run_of: Callable[..., Run]) -> None:
    ours = run_of(2)
    first = ours.model.module[0].weight
    first.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    ours.train()
    assert "module.0.weight" in ours.pending
    assert first.grad.shape == first.shape
    assert not first.grad.any()


def test_memory_of_buckets_that_are_no_more_goes_at_once(run_of: Callable[..., Any]) -> None:
    """Without a search for cycles, which comes when it likes."""
    ours = run_of(1)
    source = ours.session.source
    # This wire keeps what it has sent.
    ours.wire.started, ours.wire.works = [], []
    early = [StorageWeakRef(bucket.buffer.untyped_storage()) for bucket in source.buckets]
    gc.disable()
    try:
        ours.session.let_go_of_buckets()
        renew(ours.model, 300, source)
        source.begin_anew()
        ours.train(3)
        assert all(memory.expired() for memory in early)
    finally:
        gc.enable()
