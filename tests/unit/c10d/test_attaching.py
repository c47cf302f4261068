"""Which DDPs are planned, and how the ranks of one come together; here there is one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_wire import alone, inputs, mlp, sgd
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from bytesched.config import Config
from bytesched.errors import PluginError
from bytesched.plugins.c10d.attaching import attach_planned, why_not_sharded
from bytesched.plugins.c10d.ddp import why_kept
from bytesched.plugins.c10d.entry import Entry
from bytesched.plugins.planned.beginning import slots_of
from bytesched.plugins.planned.bundles import Slot


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with alone():
        yield


SESSIONS: list[Any] = []


@pytest.fixture(autouse=True)
def closing() -> Iterator[None]:
    yield
    while SESSIONS:
        SESSIONS.pop().close()


def attached(ddp: DistributedDataParallel, optimizer: Any = None, **fields: Any) -> Any:
    optimizer = optimizer or sgd(ddp.parameters())
    with Entry(ddp.process_group) as entry:
        SESSIONS.append(attach_planned(optimizer, ddp, ddp, Config(**fields), entry))
    SESSIONS[-1].add_optimizer(optimizer, type(optimizer), cross=True)
    return SESSIONS[-1]


def train(ddp: DistributedDataParallel, rounds: int = 3) -> None:
    for step in range(rounds):
        ddp(inputs(step)).square().mean().backward()


@pytest.mark.parametrize(
    ("fields", "options", "why"),
    [
        ({}, {}, ""),
        ({"share": "x"}, {}, "devices are shared"),
        ({"compression": "fp16"}, {}, "gradients are compressed"),
        ({}, {"has_groups": True}, "some ranks reduce some parameters"),
        ({}, {"is_folded": True}, "gradients are folded into moments"),
    ],
)
def test_why_parameters_of_a_ddp_have_no_owners(
    fields: Any, options: dict[str, bool], why: str
) -> None:
    ddp = DistributedDataParallel(mlp())
    options = {"has_groups": False, "is_folded": False, **options}
    assert why_not_sharded(ddp, Config(**fields), **options) == why


@pytest.mark.parametrize("way", ["mixed precision", "delays", "skips"])
def test_why_only_ddp_reduces_as_it_was_told_to(way: str) -> None:
    model: Any = mlp()
    options: dict[str, dict[str, Any]] = {
        "delays": {
            "delay_all_reduce_named_params": [("0.bias", model[0].bias)],
            "param_to_hook_all_reduce": model[0].weight,
        },
        "skips": {"skip_all_reduce_unused_params": True},
    }
    ddp = DistributedDataParallel(model, **options.get(way, {}))
    if way == "mixed precision":
        # DDP itself makes streams of a GPU for it.
        vars(ddp)["mixed_precision"] = _MixedPrecision(torch.float16)
    assert way in why_kept(ddp)


@pytest.mark.parametrize(
    ("ddp", "partition_bytes", "buckets", "is_cut"),
    [({}, 600, 2, True), ({}, 0, 1, False), ({"bucket_cap_mb": 1}, 600, 1, True)],
    ids=["a size is set", "no size is set", "the script has chosen buckets"],
)
def test_sizes_are_those_that_were_asked_for(
    ddp: Any, partition_bytes: int, buckets: int, is_cut: bool
) -> None:
    model = DistributedDataParallel(mlp(), **ddp)
    session = attached(model, partition_bytes=partition_bytes)
    train(model)
    sizes = [[chunk.sent.nbytes for chunk in bucket.chunks] for bucket in session.source.buckets]
    assert sum(map(sum, sizes)) == 1936
    assert len(sizes) == buckets
    assert any(len(chunks) > 1 for chunks in sizes) == is_cut
    assert max(map(max, sizes)) <= 1.5 * (partition_bytes or 1936)


@pytest.mark.parametrize(
    ("trained", "said"),
    [
        (lambda model: model[2].to("meta"), r"several devices: \['cpu', 'meta'\]"),
        (lambda _: mlp(), "the optimizer has no parameter of this model"),
    ],
    ids=["two devices", "the optimizer of another"],
)
def test_what_cannot_be_planned_is_refused(trained: Any, said: str) -> None:
    ddp = DistributedDataParallel(mlp())
    with pytest.raises(PluginError, match=said):
        attached(ddp, sgd(trained(ddp.module).parameters()))


def test_a_model_that_does_not_train_is_refused() -> None:
    model = mlp().requires_grad_(False)
    with pytest.raises(PluginError, match="no parameter that requires a gradient"):
        slots_of(model, sgd(model.parameters()), kind=Slot)


class Own(nn.Parameter):
    pass


def test_a_parameter_that_is_no_plain_one_is_refused() -> None:
    model: Any = mlp()
    model[2].weight = Own(model[2].weight.data)
    with pytest.raises(PluginError, match=r"'module\.2\.weight' is a Own, not a plain Parameter"):
        attached(DistributedDataParallel(model))


def test_what_is_not_trained_may_be_of_any_kind() -> None:
    model: Any = mlp()
    model[0].weight = Own(model[0].weight.data, requires_grad=False)
    model[2].bias.requires_grad_(False)
    session = attached(DistributedDataParallel(model), sgd(model[3].parameters()))
    names = {slot.name for slot in session.slots}
    assert "module.2.bias" in names
    assert "module.0.weight" not in names


def test_a_session_that_fails_half_way_leaves_ddp_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from bytesched.plugins.c10d.shell import BufferBroadcast

    def refuse(buffers: object, ddp: object) -> None:
        raise PluginError("half way")

    def normalized() -> nn.Module:
        return nn.Sequential(mlp(), nn.BatchNorm1d(4))

    monkeypatch.setattr(BufferBroadcast, "take_over", refuse)
    ddp = DistributedDataParallel(normalized())
    with pytest.raises(PluginError, match="half way"):
        attached(ddp)
    plain = DistributedDataParallel(normalized())
    for one in (ddp, plain):
        train(one, 2)
    for mine, theirs in zip(ddp.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]
    assert "register_comm_hook" not in vars(ddp)
