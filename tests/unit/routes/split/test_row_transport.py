"""Hops of rows through a group: sums go to their owners, and what owners have goes to all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from fake_gloo import CLOSED, Ends
from laid_out import parameters, plan_of
from met_gloo import Meeting

from bytesched.errors import PeerLost, SchedulerClosed
from bytesched.plugins.layout.packing import Packer
from bytesched.plugins.layout.plan import Ownership
from bytesched.plugins.routes.split.row_transport import ParameterHop, RowTransport
from bytesched.plugins.routes.split.rows import RowHop, RowMemory, rows_of
from bytesched.plugins.routes.streams import Streams

SIZES = (6, 3, 4, 8)
#: by position; of three ranks, the last one owns nothing
OWNERS = (0, 1, 0, 0)


class Rank:
    """One rank's transport, with the hops of all rows."""

    def __init__(self, meeting: Meeting, rank: int, compression: str = "none") -> None:
        self.rank = rank
        self.gloo, self.group = meeting.gloos[rank], meeting.groups[rank]
        size = self.group.size
        self.plan = plan_of(parameters(*((n,) for n in SIZES)))
        # Chunks of two tensors of rank 0 would be one chunk, were they of one kind.
        owners = [owner % size for owner in OWNERS]
        self.plan.cut(1 << 20, Ownership(size, owners, kinds=[0, 0, 0, 1]))
        packer = Packer(self.plan, size, compression)
        self.rows = rows_of(self.plan, packer, size)
        self.memory = RowMemory()
        self.transport = RowTransport(self.group, self.plan, packer, Streams(), self.memory)
        self.ends = Ends()
        count = len(self.rows)
        self.sums = [
            RowHop(row, index=row.number, priority=row.number, is_spread=False) for row in self.rows
        ]
        self.spreads = [
            RowHop(row, index=count + row.number, priority=row.number, is_spread=True)
            for row in self.rows
        ]
        for hop, follower in zip(self.sums, self.spreads, strict=True):
            hop.followers = (follower,)

    def take_gradients(self) -> None:
        for position, slot in enumerate(self.plan.slots):
            slot.parameter.grad = gradient(self.rank, position)
            assert slot.take_gradient()

    def start(self, *hops: RowHop) -> None:
        for hop in hops:
            self.transport.start(hop, self.ends.done)

    def wait(self, *hops: RowHop) -> None:
        self.ends.wait(*(hop.name for hop in hops))

    def values(self) -> list[list[float]]:
        return [slot.view.tolist() for slot in self.plan.slots]

    def held(self) -> int:
        """Gradients that are still needed."""
        return sum(slice_.grad is not None for slices in self.plan.slices for slice_ in slices)


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[list[Rank]]:
    """As many as the parameter says, or two."""
    count = getattr(request, "param", 2)
    meeting = Meeting(count)
    made = [Rank(meeting, rank) for rank in range(count)]
    yield made
    for rank in made:
        rank.transport.close()


def gradient(rank: int, position: int) -> torch.Tensor:
    """Numbers that add up exactly, whatever they are divided by."""
    return 12.0 * (1 + position + 4 * rank) + 12.0 * torch.arange(SIZES[position])


def mean(ranks: int, position: int) -> list[float]:
    """Of all ranks, each divided first."""
    parts = [gradient(rank, position) * (1 / ranks) for rank in range(ranks)]
    total: torch.Tensor = sum(parts[1:], parts[0])
    return total.tolist()


@pytest.mark.parametrize("ranks", [1, 2, 3], indirect=True)
def test_sums_come_to_their_owners_and_spreads_bring_them_to_all(ranks: list[Rank]) -> None:
    wanted = [mean(len(ranks), position) for position in range(len(SIZES))]
    for one in ranks:
        one.take_gradients()
        one.start(*one.sums)
    for one in ranks:
        one.wait(*one.sums)
        for position, values in enumerate(one.values()):
            is_own = OWNERS[position] % len(ranks) == one.rank
            assert (values == wanted[position]) is is_own
    for one in ranks:
        one.start(*one.spreads)
    for one in ranks:
        one.wait(*one.spreads)
        assert one.values() == wanted
        assert not one.ends.errors


def travelling(ranks: list[Rank]) -> Iterator[str]:
    """A round; the name of its hops as soon as all ranks have come to their end."""
    for one in ranks:
        one.take_gradients()
    for hops in ("sums", "spreads"):
        for one in ranks:
            one.start(*getattr(one, hops))
        for one in ranks:
            one.wait(*getattr(one, hops))
        yield hops


def test_what_travels_compressed_is_the_same_on_all_ranks() -> None:
    meeting = Meeting(2)
    ranks = [Rank(meeting, rank, "bf16") for rank in range(2)]
    for _ in travelling(ranks):
        pass
    for position, values in enumerate(ranks[0].values()):
        rounded = [gradient(rank, position).bfloat16() / 2 for rank in range(2)]
        assert values == (rounded[0] + rounded[1]).tolist()
    assert ranks[0].values() == ranks[1].values()
    assert {row.dtype for _, row, *_ in ranks[0].gloo.begun} == {torch.bfloat16}
    for one in ranks:
        one.transport.close()


def test_gradients_live_until_their_sum_is_complete(ranks: list[Rank]) -> None:
    one, other = ranks
    for each in ranks:
        each.take_gradients()
    one.start(*one.sums)
    assert one.held() == len(SIZES)
    other.start(other.sums[0])
    one.wait(one.sums[0])
    other.wait(other.sums[0])
    assert one.held() == len(SIZES) - len(one.rows[0].present())
    other.start(*other.sums[1:])
    one.wait(*one.sums)
    assert one.held() == 0


def test_memory_goes_from_hop_to_hop_and_is_used_again(ranks: list[Rank]) -> None:
    """A sum whose spread does not follow leaves nothing behind; any other leaves its part."""
    begun = []
    for _ in range(2):
        for hops in travelling(ranks):
            for one in ranks:
                one.ends = Ends()
                assert "0 hops under way" in repr(one.transport)
                # Parts wait for their spread.
                assert len(one.memory._taken) == (len(one.rows) if hops == "sums" else 0)
        begun.append({row.data_ptr() for _, row, *_ in ranks[0].gloo.begun})
    assert begun[0] == begun[1]
    for one in ranks:
        one.sums[0].followers = ()
        one.take_gradients()
        one.start(one.sums[0])
    for one in ranks:
        one.wait(one.sums[0])
        assert not one.memory._taken


def test_parameters_that_owners_have_staged_come_in_their_places(ranks: list[Rank]) -> None:
    """No other element changes; a rank that has staged nothing takes part all the same."""
    hops = []
    for one in ranks:
        for buffer in one.plan.buffers:
            buffer.fill_(-1.0)
        row = next(row for row in one.rows if len(row.present()) == 2)
        sent = row.chunks[1]
        assert sent is not None
        # Behind the part of the other rank, which is longer.
        assert one.plan.buffers[sent.index].numel() == 3 < row.length
        hop = ParameterHop(row, index=100, turn=0)
        if one.rank:
            hop.own, hop.staged = sent, one.memory.take(torch.empty(0), row.length)
            hop.staged.copy_(torch.arange(row.length))
        else:
            hop.foreign = [(sent, [slice(0, 1), slice(2, 3)])]
        hops.append(hop)
        one.start(hop)
    for one, hop in zip(ranks, hops, strict=True):
        one.wait(hop)
        assert not one.ends.errors
        assert not one.memory._taken
        expected = [[-1.0] * size for size in SIZES]
        if not one.rank:
            expected[1] = [0.0, -1.0, 2.0]
        assert one.values() == expected


def test_a_hop_that_fails_is_named_and_nothing_is_taken_over(ranks: list[Rank]) -> None:
    one = ranks[0]
    one.take_gradients()
    one.start(*one.sums[:2])
    before = one.values()
    first, second = one.gloo.works()
    first.end(CLOSED)
    second.end()
    one.wait(*one.sums[:2])
    assert list(one.ends.errors) == [one.sums[0].name]
    error = one.ends.errors[one.sums[0].name]
    assert isinstance(error, PeerLost)
    assert error.task == one.sums[0].name
    own = one.rows[0].chunks[0]
    assert own is not None
    for slot in one.plan.slots_of[own.index]:
        assert slot.view.tolist() == before[one.plan.slots.index(slot)]


def test_a_hop_that_cannot_begin_is_an_error_of_ours(ranks: list[Rank]) -> None:
    one = ranks[0]
    one.take_gradients()
    one.gloo.gone.add(1)
    with pytest.raises(PeerLost, match=r"rank 1 is gone .*closed by peer") as raised:
        one.start(one.sums[0])
    assert raised.value.task == one.sums[0].name
    assert raised.value.peers == (1,)
    assert not one.ends.names


def test_closed_it_breaks_what_is_under_way(ranks: list[Rank]) -> None:
    one, other = ranks
    one.take_gradients()
    one.start(one.sums[0])
    assert "1 hops under way" in repr(one.transport)
    for each in ranks:
        each.transport.close()
        each.transport.close()
    one.wait(one.sums[0])
    error = one.ends.errors[one.sums[0].name]
    assert isinstance(error, SchedulerClosed)
    assert f"closed while sum of row 0, {one.rows[0].present()[0].name} was" in str(error)
    assert one.group.is_aborted
    # It had nothing under way.
    assert not other.group.is_aborted
