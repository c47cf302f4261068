"""Parameters that some ranks sum among themselves: their buckets, and whether any has used them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from fake_wire import FakeWire
from torch import nn

from bytesched.plugins.failures import Failures
from bytesched.plugins.planned.buckets import Bucket, Chunk
from bytesched.plugins.planned.bundles import Slot
from bytesched.plugins.planned.hook_source import HookSource
from bytesched.plugins.planned.wire import LoneWire, Partition

#: of two groups of two ranks this is in the second one; of four of one, in the last
PAIRS = Partition((1, 3), 1, 2, FakeWire())
ALONE = Partition((3,), 3, 4, LoneWire())


class Experts(nn.Module):
    """A gate, and experts of which `used` run."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(2, 2, bias=False)
        self.experts = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(4))
        self.used = set(range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.gate(x)
        for number in sorted(self.used):
            x = x + self.experts[number](x)
        return x


class Listening:
    """The source of a model whose first experts are of `PAIRS`, and whose last one is `ALONE`.

    Args:
        others: what another rank tells, round by round.
    """

    def __init__(
        self, *others: Sequence[float], bucket_bytes: int = 32, is_static: bool = False
    ) -> None:
        other = FakeWire()
        other.told = [list(numbers) for numbers in others]
        self.wire = FakeWire(ranks=[other] if others else None)
        self.model = Experts()
        partitions = [None, PAIRS, PAIRS, None, ALONE]
        self.sent: list[list[int]] = []
        self.source = HookSource(
            self,
            self.wire,
            Failures(self.wire),
            [Slot(*named) for named in self.model.named_parameters()],
            bucket_bytes=bucket_bytes,
            divisor=4,
            find_unused=True,
            is_static=is_static,
            partitions={
                id(parameter): partition
                for parameter, partition in zip(self.model.parameters(), partitions, strict=True)
                if partition is not None
            },
        )
        self.source.hook()

    def backward(self) -> None:
        self.model.zero_grad()
        self.source.pass_begins()
        self.model(torch.ones(1, 2)).sum().backward()
        for bucket in self.source.buckets:
            self.land(bucket)

    @property
    def layout(self) -> list[tuple[list[str], Any]]:
        return [
            ([member.name for member in bucket.members], bucket.chunks[0].wire)
            for bucket in self.source.buckets
        ]

    def unused(self) -> list[str]:
        return [name for name, p in self.model.named_parameters() if p.grad is None]

    # -- see `Listener`

    def round_begins(self) -> None:
        self.sent.append([])

    def layout_changes(self) -> None:
        pass

    def ready(self, chunks: Sequence[Chunk], *, is_last: bool) -> None:
        self.sent[-1] += [chunk.index for chunk in chunks]

    def land(self, bucket: Bucket, why: str = "") -> None:
        if bucket.is_under_way:
            bucket.hand_back()

    def settle(self, member: Any) -> None:
        raise AssertionError("nobody reads before everything has come")

    def answer(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return NotImplemented

    def round_ends(self, buckets: Sequence[Bucket], *, is_early: bool) -> None:
        pass


def test_a_bucket_is_of_one_partition() -> None:
    ours = Listening()
    ours.backward()
    assert ours.layout == [
        (["experts.3.weight"], ALONE.wire),
        (["experts.1.weight", "experts.0.weight"], PAIRS.wire),
        (["experts.2.weight", "gate.weight"], None),
    ]


def test_buckets_go_in_the_order_of_their_last() -> None:
    ours = Listening(bucket_bytes=1 << 20)
    ours.backward()
    assert [names[-1] for names, _ in ours.layout] == [
        "experts.3.weight",
        "experts.0.weight",
        "gate.weight",
    ]
    ours.backward()
    assert ours.sent == [[0, 1, 2]] * 2


#: the gate, experts of pairs, the one of all, and those that are alone: who has used them
ROUND = [1.0, *(0.0, 1.0), *(0.0, 1.0), 1.0, *(0.0, 0.0, 0.0, 1.0)]


def test_each_group_says_by_itself_what_it_uses() -> None:
    ours = Listening()
    ours.backward()
    cells = len(ROUND)
    assert ours.wire.told[0][:cells] == ROUND
    ours.model.used = {1, 2}
    ours.backward()
    assert ours.wire.told[1] == [1, *(0, 0), *(0, 1), 1, *(0, 0, 0, 0), 2]


@pytest.mark.parametrize(
    ("others", "left"),
    [
        ([1, *(1, 0), *(1, 0), 1, *(1, 1, 1, 0), 0], ["experts.0.weight", "experts.3.weight"]),
        ([1, *(0, 1), *(0, 1), 1, *(1, 1, 1, 0), 0], ["experts.3.weight"]),
    ],
    ids=["another group", "the same group"],
)
def test_what_no_rank_of_the_group_has_used_stays(others: list[float], left: list[str]) -> None:
    ours = Listening([0.0] * (len(ROUND) + 5 + 1), others)
    ours.backward()
    ours.model.used = {1}
    ours.backward()
    assert ours.unused() == left


def test_a_rank_that_is_alone_has_its_sum_at_once() -> None:
    wire, gradient = LoneWire(), torch.ones(2)
    told: list[object] = []
    work = wire.start(gradient, "a key")
    assert work.is_completed()
    work.get_future().add_done_callback(told.append)
    wire.wait(work, "0.weight")
    assert len(told) == 1
    assert gradient.tolist() == [1, 1]


def test_who_lets_go_stays_for_a_map_that_others_wait_for() -> None:
    ours = Listening()
    stayed: list[Any] = []
    vars(ours.wire)["wait_left"] = stayed.extend
    ours.backward()
    assert not stayed
    # Here all are used, so that nobody waits for it.
    ours.backward()
    ours.source.let_go()
    assert len(stayed) == 1
    ours.source.let_go()
    assert len(stayed) == 1


def test_a_static_graph_has_as_many_gradients_in_each_round() -> None:
    ours = Listening(is_static=True)
    *others, gate = ours.source.entries[::-1]
    for number in range(1, 4):
        ours.source.pass_begins()
        for entry in (*others, gate, gate):
            # The gate's bucket is the last one.
            assert ours.sent[number - 1 :] in ([], [[0]], [[0, 1]])
            parameter = entry.slot.parameter
            parameter.grad = torch.ones_like(parameter)
            ours.source.gradient(parameter)
        ours.source.finish()
        assert ours.sent[number - 1 :] == [[0, 1, 2]]
        assert gate.expected == 2
        for bucket in ours.source.buckets:
            ours.land(bucket)
