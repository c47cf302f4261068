"""What must be true after other sizes than before: gates, and the order of chunks."""

from __future__ import annotations

from typing import Any, cast

import comparing
import pytest
import torch
from ranks import Ranks
from restless import ScriptedJob
from torch import Tensor, nn
from training import Job, sgd, train

import bytesched
from bytesched.plugins.proxies.pending import is_held
from bytesched.tunable import Setting

WIDTH = 8
#: bytes of each of its gradients
LAYER_BYTES = 4 * WIDTH * WIDTH


class Watched(nn.Linear):
    """Remembers at which calls its weight was still pending, which only Python code would see."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)
        self.pending: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.pending.append(is_held(cast(nn.Parameter, self.weight)))
        return super().forward(x)


class Sums(nn.Module):
    """Its gradients are whole numbers that no order of adding them rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Watched() for _ in range(7))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x).sum() for layer in self.layers]).sum()


def whole_numbers(job: Job, step: int) -> Tensor:
    """Multiples of 12, so that the mean over up to four ranks is a whole number as well."""
    return job.inputs(step, 2, WIDTH).mul(8).round().mul(12)


def changing(job: Job, steps: int, buckets: dict[str, float]) -> None:
    """Training; what was pending, and how the ranks agreed, goes to the figures."""
    sums = Sums()
    model = job.ddp(sums, **buckets)
    optimizer = job.wrap(sgd(model, lr=2.0**-10), model)
    held, sizes = [], []

    def look(step: int) -> None:
        # A tuner is asked when the first round is over.
        if job.wrapped and step:
            sizes.append(str(bytesched.stats(optimizer)["partition_bytes"]))
        held.append(any(is_held(parameter) for parameter in sums.parameters()))

    loss = lambda step: model(whole_numbers(job, step))  # noqa: E731
    train(job, model, optimizer, steps=steps, loss=loss, after_step=look)
    job.record_state(model, optimizer)
    passed = [any(calls) for calls in zip(*(layer.pending for layer in sums.layers), strict=True)]
    figures: dict[str, Any] = {
        "held": "".join("-h"[now] for now in held),
        "passed": "".join("-p"[now] for now in passed),
        "sizes": " ".join(sizes),
    }
    job.stats |= figures


def check(
    ranks: Ranks, steps: int, *turns: tuple[Setting, int], **buckets: float
) -> list[dict[str, Any]]:
    """The values are those of plain DDP, to the last bit; the figures of every rank."""
    return comparing.check(ranks, changing, steps, buckets, kind=ScriptedJob, mode="", turns=turns)


def setting(layers: float) -> Setting:
    """Partitions of so many layers, two of which may be in flight."""
    partition_bytes = int(layers * LAYER_BYTES)
    return Setting(partition_bytes, 2 * partition_bytes)


@pytest.mark.parametrize("then", [0.3, 2])
@pytest.mark.one_in(2)
def test_gates_wait_for_the_bundles_of_the_new_cut(two_ranks: Ranks, then: float) -> None:
    """From one bundle per layer to several per layer, and to several layers in one."""
    for figures in check(two_ranks, 12, (setting(1), 4), (setting(then), 1)):
        assert figures["sizes"].split()[-1] == str(int(then * LAYER_BYTES))
        # Nothing reads a weight between step() and forward, where the gates alone release it.
        assert "h" in figures["held"][5:]
        # In the first two passes the order of first use is observed, by the same means.
        assert "p" not in figures["passed"][2:]


@pytest.mark.parametrize("sizes", [(0.3, 2, 0.7), (100, 0.3, 1)], ids=str)
@pytest.mark.one_in(2)
def test_ranks_agree_on_the_chunks_of_the_new_cut(
    three_ranks: Ranks, sizes: tuple[float, ...]
) -> None:
    turns = [(setting(size), 3) for size in sizes]
    for figures in check(three_ranks, 12, *turns):
        assert len(set(figures["sizes"].split())) == len(sizes)


def test_chunks_change_where_the_script_has_sized_buckets(two_ranks: Ranks) -> None:
    """A bucket of DDP's stays, and is cut into others."""
    buckets = {"bucket_cap_mb": 4.5 * LAYER_BYTES / (1 << 20)}
    for sizes, chunks in (((2, 100), 2), ((100, 0.5), 14)):
        turns = [(setting(size), 4) for size in sizes]
        for figures in check(two_ranks, 12, *turns, **buckets):
            assert figures["chunks"] == chunks


@pytest.mark.parametrize("pool", ["two_ranks", "three_ranks"])
@pytest.mark.one_in(2)
def test_sizes_change_when_an_order_was_planned(pool: str, request: pytest.FixtureRequest) -> None:
    """Each cut has backward's order until its own is planned."""
    ranks: Ranks = request.getfixturevalue(pool)
    turns = [(setting(size), 9) for size in (3, 100, 6)]
    turns.append((setting(6), 1))
    for figures in check(ranks, 32, *turns):
        assert len(set(figures["sizes"].split())) == 3
