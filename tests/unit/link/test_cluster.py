"""Clusters in virtual time: what is known in closed form, and two engines that agree."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import controls, fabrics, weathers, works

from bytesched.link.cluster import Cluster
from bytesched.link.control import Control, Weather
from bytesched.link.fabric import Fabric
from bytesched.link.vectors import VectorCluster
from bytesched.link.work import Bundle, Job, Work

KNOWN = Control(fanout=0, send_s=0.0, latency_s=0.0)


def calm(ranks: int) -> Weather:
    return Weather((1.0,) * ranks)


def two_layers(led: bool = True, credit_bytes: int = 1 << 40) -> Work:
    return Work(
        name="two",
        forward_s=(1.0, 1.0),
        backward_s=(2.0, 2.0),
        jobs=(Job(100, 0, 0), Job(300, 1, 1)),
        bundles=(Bundle((0,), 0.0), Bundle((1,), 0.0)),
        bundle_of=(0, 1),
        led=led,
        credit_bytes=credit_bytes,
    )


@settings(max_examples=40)
@given(st.data())
def test_vectors_are_the_same_as_a_core_on_every_rank(data: st.DataObject) -> None:
    """The same times, bit for bit, the same order and as many words, in every iteration."""
    work, fabric, control = data.draw(works()), data.draw(fabrics()), data.draw(controls())
    one, all_at_once = Cluster(work, fabric, control), VectorCluster(work, fabric, control)
    for weather in data.draw(weathers(fabric.ranks)):
        assert one.iterate(weather) == all_at_once.iterate(weather)
    if one.planning.replay:
        assert one.largest() == all_at_once.largest()


@pytest.mark.parametrize("engine", [Cluster, VectorCluster])
def test_an_iteration_by_hand(engine: type[Cluster] | type[VectorCluster]) -> None:
    """Backward 4 s; layer 1 is on the link from 2 s to 5 s, layer 0 from 5 s to 6 s."""
    fabric = Fabric(ranks=2, bytes_per_s=100.0, latency_s=0.0)
    found = engine(two_layers(), fabric, KNOWN).iterate(calm(2))
    assert found.ended_s == 6.0 + 1.0 + 1.0
    # The last rank decides when a collective begins.
    late = engine(two_layers(), fabric, KNOWN).iterate(Weather((1.0, 2.0)))
    assert late.ended_s == 8.0 + 1.0 + 2.0 * (1.0 + 1.0)


@pytest.mark.parametrize("engine", [Cluster, VectorCluster])
@pytest.mark.parametrize(("fanout", "hops"), [(0, 0), (7, 1), (2, 3), (1, 7)])
def test_a_word_takes_the_depth_of_its_tree(
    engine: type[Cluster] | type[VectorCluster], fanout: int, hops: int
) -> None:
    """The last job is ready everywhere long before: what it waits for is the leader's word."""
    work = two_layers(credit_bytes=1)
    fabric = Fabric(ranks=8, bytes_per_s=1e9, latency_s=0.0)
    control = Control(fanout=fanout, send_s=0.0, latency_s=0.25)
    found = engine(work, fabric, control).iterate(Weather((1.0,) + (0.01,) * 7))
    assert found.ended_s == pytest.approx(4.0 + 0.25 * hops + 2.0, abs=1e-5)
    assert found.words == 2


def test_work_in_an_order_is_the_same_work() -> None:
    """In the order that a leader without messages has chosen, it takes as long, known to all."""
    fabric = Fabric(ranks=2, bytes_per_s=100.0, latency_s=0.0)
    led = Cluster(two_layers(), fabric, KNOWN).iterate(calm(2))
    assert led.order == (1, 0)
    known = Cluster(two_layers().in_order(led.order), fabric, KNOWN).iterate(calm(2))
    assert known.ended_s == led.ended_s
    assert known.words == 0


@pytest.mark.parametrize("engine", [Cluster, VectorCluster])
def test_an_order_is_planned_and_replayed_without_words(
    engine: type[Cluster] | type[VectorCluster],
) -> None:
    fabric = Fabric(ranks=3, bytes_per_s=100.0, latency_s=0.0)
    control = Control(fanout=2, send_s=0.0, latency_s=0.0, replay=True)
    cluster = engine(two_layers(), fabric, control)
    found = [cluster.iterate(calm(3)) for _ in range(9)]
    assert [one.replayed for one in found] == [False] * 7 + [True] * 2
    assert [one.words for one in found] == [2] * 7 + [0] * 2
    assert len({one.order for one in found}) == 1


def test_start_up_hides_only_where_collectives_overlap() -> None:
    hidden = Fabric(ranks=4, bytes_per_s=100.0, latency_s=0.5)
    shown = replace(hidden, overlaps=False)
    assert hidden.occupied_s(100) == 1.5
    assert hidden.start_up_s(100) == 3.0
    assert shown.occupied_s(100) == 4.5
    assert shown.start_up_s(100) == 0.0
    assert replace(hidden, ranks=1024, algorithm="tree").start_up_s(100) == 10.0
    assert replace(hidden, ranks=1024, algorithm="exchange").start_up_s(100) == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": 1}, "at least 2"),
        ({"algorithm": "star"}, "'star'"),
        ({"bytes_per_s": 0.0}, "no such links"),
        ({"latency_s": -1.0}, "no such links"),
    ],
)
def test_links_that_cannot_be(change: dict[str, object], message: str) -> None:
    facts: dict[str, object] = {"ranks": 2, "bytes_per_s": 1.0, "latency_s": 0.0}
    with pytest.raises(ValueError, match=message):
        Fabric(**(facts | change))  # type: ignore[arg-type]
