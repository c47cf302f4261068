"""DDP's reducer as the source of chunks: what it tells, and the gradients that it leaves."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from fake_wire import alone, inputs, mlp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bytesched.plugins.planned.buckets import Bucket, Chunk, Member
from bytesched.plugins.planned.cutting import Cut
from bytesched.plugins.planned.reducer import hook, keep_local, renew
from bytesched.plugins.planned.reducer_source import ReducerSource
from bytesched.plugins.planned.source import Phase
from bytesched.plugins.proxies.pending_grads import PendingGrad


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with alone():
        yield


class Listening:
    """A session of three ranks, all with the same gradients, that lands what it is asked for."""

    def __init__(
        self, model: nn.Module, *, size: int = 3, keeps_local: bool = True, **options: Any
    ) -> None:
        self.ddp: Any = DistributedDataParallel(model, **options)
        renew(self.ddp, 600)
        self.size = size
        self.names = {id(p): name for name, p in self.ddp.module.named_parameters()}
        self.log: list[Any] = []
        self.source = ReducerSource(
            self,
            size,
            self.names,
            holds_gradients=self.ddp.gradient_as_bucket_view,
            is_static=self.ddp.static_graph,
            is_batched=False,
            may_be_unused=self.ddp.find_unused_parameters,
            cut=lambda _, __, buffer: [Cut(buffer.numel())],
            future=torch.futures.Future,
            is_manual=lambda: False,
            keep_local=lambda: keeps_local and keep_local(weakref.ref(self.ddp)),
        )
        hook(self.ddp, self.source, lambda: None)

    def backward(self, step: int = 0) -> None:
        loss = self.ddp(inputs(step)).square().mean()
        for bucket in self.source.buckets:
            self.land(bucket)
        self.log.clear()
        self.source.backward_begins(list(self.ddp.parameters()))
        loss.backward()

    def train(self, rounds: int, *, set_to_none: bool = True) -> None:
        for step in range(rounds):
            self.ddp.zero_grad(set_to_none=set_to_none)
            self.backward(step)

    # -- see `Listener`

    def round_begins(self) -> None:
        self.log.append(("round_begins", self.source.phase))

    def layout_changes(self) -> None:
        self.log.append("layout_changes")

    def ready(self, chunks: Sequence[Chunk], *, is_last: bool) -> None:
        self.log.append(("ready", [chunk.index for chunk in chunks], is_last))

    def land(self, bucket: Bucket, why: str = "") -> None:
        if bucket.is_under_way:
            self.log.append(("land", self.source.phase))
            bucket.buffer.data.mul_(self.size)
            bucket.hand_back()

    def answer(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return NotImplemented

    def settle(self, member: Member) -> None:
        self.log.append(("settle", member.name))
        self.land(member.bucket)

    def round_ends(self, buckets: Sequence[Bucket], *, is_early: bool) -> None:
        self.log.append(("round_ends", len(buckets), is_early, self.source.phase))

    @property
    def grads(self) -> list[Any]:
        return [parameter.grad for parameter in self.ddp.parameters()]


def expected(rounds: int, **options: Any) -> list[torch.Tensor]:
    """The gradients of the last round, as DDP divides and sums."""
    plain = Listening(mlp(), size=1, **options)
    plain.train(rounds)
    return [(grad.mul_(1 / 3)).mul_(3) for grad in plain.grads]


# -- what is told ----------------------------------------------------------------------


def test_early_rounds_are_summed_in_backward() -> None:
    ours = Listening(mlp())
    for _ in range(2):
        assert ours.source.is_early
        ours.train(1)
        lands = [("land", Phase.COMPLETE)] * len(ours.source.buckets)
        last = ("round_ends", len(lands), True, Phase.IDLE)
        assert ours.log[-len(lands) - 1 :] == [*lands, last]
        assert not any(type(grad) is PendingGrad for grad in ours.grads)
    assert not ours.source.is_early


def test_later_rounds_end_with_everything_under_way() -> None:
    ours = Listening(mlp())
    ours.train(3)
    count = len(ours.source.buckets)
    assert count > 1
    assert ours.log == [
        ("round_begins", Phase.OPEN),
        *(("ready", [number], number == count - 1) for number in range(count)),
        ("round_ends", count, False, Phase.IDLE),
    ]
    assert all(bucket.is_under_way for bucket in ours.source.buckets)
    assert all(type(grad) is PendingGrad for grad in ours.grads)
    assert ours.source.rounds == 3


def test_other_buckets_are_told_and_those_that_stay_are_kept() -> None:
    ours = Listening(mlp())
    changes = []
    for _ in range(4):
        ours.train(1)
        changes.append(ours.log.count("layout_changes"))
    # DDP makes other ones after the first round.
    assert changes[0] == 1
    assert changes[1] > 1
    assert changes[2:] == [0, 0]
    buckets = list(ours.source.buckets)
    ours.train(1)
    assert all(map(lambda a, b: a is b, buckets, ours.source.buckets))


def test_a_round_is_ddps() -> None:
    """Accumulated rounds, and passes through other graphs, are none."""
    ours = Listening(mlp())
    ours.train(3)
    with ours.ddp.no_sync():
        ours.backward()
    ours.ddp.module(inputs(0)).sum().backward()
    assert ours.source.rounds == 3
    assert ours.log == []
    ours.backward()
    assert ours.source.rounds == 4


def test_members_of_an_open_round_are_known() -> None:
    ours = Listening(mlp())
    ours.train(2)
    first: Any = ours.ddp.module[0].weight

    def fail(grad: torch.Tensor) -> None:
        raise ArithmeticError("in the middle")

    first.register_hook(fail)
    with pytest.raises(ArithmeticError):
        ours.train(1)
    assert ours.source.phase is Phase.OPEN
    here = [member.name for member in ours.source.members()]
    assert here
    assert "0.weight" not in here


# -- gradients -------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("keeps_local", [False, True])
def test_gradients_have_the_bits_of_ddp(keeps_local: bool, view: bool, rounds: int) -> None:
    """Three is no power of two: to multiply and to divide are not the same."""
    ours = Listening(mlp(), keeps_local=keeps_local, gradient_as_bucket_view=view)
    ours.train(rounds)
    for ours_, theirs in zip(ours.grads, expected(rounds), strict=True):
        assert torch.equal(ours_, theirs)


def test_ddp_does_not_copy_what_is_not_summed() -> None:
    """A pass over all gradients; whoever reads them gets the sums."""
    copies = []
    for keeps_local in (False, True):
        ours = Listening(mlp(), keeps_local=keeps_local)
        ours.train(2)
        with torch.profiler.profile() as profiled:
            ours.train(1)
        assert all(type(grad) is PendingGrad for grad in ours.grads)
        copies.append(sum(one.count for one in profiled.key_averages() if one.key == "aten::copy_"))
    assert copies[0] - copies[1] == len(ours.grads)


def test_a_gradient_that_a_hook_has_taken_is_made_by_ddp() -> None:
    ours = Listening(mlp())
    ours.train(2)
    first: Any = ours.ddp.module[0].weight
    first.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    ours.train(1)
    assert type(first.grad) is PendingGrad
    assert first.grad.shape == first.shape
    assert not first.grad.any()


def test_what_lies_in_a_bucket_already_is_divided_there() -> None:
    ours = Listening(mlp(), gradient_as_bucket_view=True)
    ours.train(2)
    ours.ddp.zero_grad(set_to_none=False)
    ours.backward(1)
    plain = Listening(mlp(), size=1)
    plain.train(2)
    for grad, other in zip(ours.grads, plain.grads, strict=True):
        assert torch.equal(grad, other.div_(3).mul_(3))


def test_a_gradient_that_others_see_is_landed_at_once() -> None:
    ours = Listening(mlp())
    ours.train(2, set_to_none=False)
    alias = ours.grads[0].view(-1)
    ours.ddp.zero_grad(set_to_none=False)
    ours.backward()
    pending = [type(grad) is PendingGrad for grad in ours.grads]
    assert not pending[0]
    assert any(pending)
    assert torch.equal(alias, ours.grads[0].flatten())


class Half(nn.Module):
    """A layer of two is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, input: torch.Tensor) -> Any:
        return self.used(input)


@pytest.mark.parametrize("view", [False, True])
def test_what_no_rank_has_used_keeps_what_it_has(view: bool) -> None:
    model = Half()
    ours = Listening(model, find_unused_parameters=True, gradient_as_bucket_view=view)
    for _ in range(4):
        ours.train(1)
        assert model.unused.weight.grad is None
        assert model.used.weight.grad is not None
    assert type(model.used.weight.grad) is PendingGrad
    model.unused.weight.grad = kept = torch.ones(4, 8)
    model.unused.bias.grad = torch.ones(4)
    ours.backward()
    assert type(kept) is torch.Tensor
    assert model.unused.weight.grad.tolist() == [[1.0] * 8] * 4


def test_a_static_graph_is_landed_in_its_early_rounds() -> None:
    ours, theirs = Listening(mlp(), static_graph=True), expected(1)
    for is_pending in (False, False, True):
        ours.train(1)
        assert [type(grad) is PendingGrad for grad in ours.grads] == [is_pending] * 6
        assert all(map(torch.equal, ours.grads, theirs))


def test_it_keeps_no_ddp_alive() -> None:
    ours = Listening(mlp())
    ours.train(3)
    source, ddp = ours.source, weakref.ref(ours.ddp)
    assert source.buckets
    del ours.ddp
    gc.collect()
    assert ddp() is None


def test_memory_of_buckets_that_are_no_more_goes_at_once() -> None:
    """Without a search for cycles, which comes when it likes."""
    ours = Listening(mlp())
    ours.train(1)
    early = [weakref.ref(bucket) for bucket in ours.source.buckets]
    gc.disable()
    try:
        renew(ours.ddp, 300, ours.source)
        ours.source.begin_anew()
        ours.train(3)
        assert all(bucket() is None for bucket in early)
    finally:
        gc.enable()
