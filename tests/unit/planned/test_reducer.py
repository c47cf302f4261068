"""The reducer of a DDP: other buckets, and the gradients that our hook leaves."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_wire import Run, inputs, mlp
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

from bytesched.plugins.planned import ddp_session
from bytesched.plugins.planned.reducer import hook, renew

pytestmark = pytest.mark.usefixtures("group")


def test_without_a_size_buckets_are_those_of_ddp() -> None:
    caps = []
    for again in (False, True):
        ddp = DistributedDataParallel(mlp(), bucket_cap_mb=0.0005)
        if again:
            renew(ddp, 600)
            renew(ddp, 0)
        sizes: list[int] = []

        def reduced(state: object, bucket: Any, sizes: list[int] = sizes) -> Any:
            sizes.append(bucket.buffer().nbytes)
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        source: Any = reduced
        hook(ddp, source, lambda: None)
        for step in range(3):
            ddp(inputs(step)).sum().backward()
        caps.append((ddp.bucket_bytes_cap, sizes))
    assert caps[0] == caps[1]
    defaults: Any = dist
    assert defaults._DEFAULT_FIRST_BUCKET_BYTES == 1024 * 1024


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
