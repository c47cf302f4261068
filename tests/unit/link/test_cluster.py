"""Clusters in virtual time: what is known in closed form."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import fabrics, weathers, works

from bytesched.course import PLANNED_AFTER
from bytesched.link.cluster import Cluster, Weather
from bytesched.link.fabric import Fabric
from bytesched.link.work import Bundle, Gather, Job, Work


def calm(ranks: int) -> Weather:
    return Weather((1.0,) * ranks)


def two_layers() -> Work:
    return Work(
        name="two",
        forward_s=(1.0, 1.0),
        backward_s=(2.0, 2.0),
        jobs=(Job(100, 0, 0), Job(300, 1, 1)),
        bundles=(Bundle((0,), 0.0), Bundle((1,), 0.0)),
        bundle_of=(0, 1),
        is_planned=True,
    )


def test_an_iteration_by_hand() -> None:
    """Backward 4 s; layer 1 is on the link from 2 s to 5 s, layer 0 from 5 s to 6 s."""
    fabric = Fabric(ranks=2, bytes_per_s=100.0, latency_s=0.0)
    assert Cluster(two_layers(), fabric).iterate(calm(2)) == 6.0 + 1.0 + 1.0
    # The last rank decides when a collective begins.
    late_s = Cluster(two_layers(), fabric).iterate(Weather((1.0, 2.0)))
    assert late_s == 8.0 + 1.0 + 2.0 * (1.0 + 1.0)


def test_credit_keeps_what_is_next_from_starting() -> None:
    """The link has nothing to do while the end of a job is on its way."""
    fabric = Fabric(ranks=2, bytes_per_s=100.0, latency_s=0.0, delay_s=10.0)
    work = replace(two_layers(), backward_s=(0.0, 2.0))
    assert Cluster(work, fabric).iterate(calm(2)) == 2.0 + 3.0 + 1.0 + 10.0 + 2.0
    one_at_a_time = replace(work, credit_bytes=1)
    assert Cluster(one_at_a_time, fabric).iterate(calm(2)) == 2.0 + 13.0 + 11.0 + 2.0


def test_an_order_is_planned_of_the_slowest_rank() -> None:
    """While the last layer is on the link, the others become ready: the front one goes next."""
    work = Work(
        name="three",
        forward_s=(0.1, 0.1, 0.1),
        backward_s=(1.0, 1.0, 1.0),
        jobs=tuple(Job(500, layer, layer) for layer in range(3)),
        bundles=tuple(Bundle((layer,), 0.0) for layer in range(3)),
        bundle_of=(0, 1, 2),
        is_planned=True,
        credit_bytes=1,
    )
    cluster = Cluster(work, Fabric(ranks=2, bytes_per_s=100.0, latency_s=0.0))
    orders = []
    for _ in range(PLANNED_AFTER + 1):
        orders.append(list(cluster.order))
        cluster.iterate(Weather((1.0, 0.1)))
    assert orders == [[2, 1, 0]] * PLANNED_AFTER + [[2, 0, 1]]


@settings(max_examples=40)
@given(st.data())
def test_no_iteration_beats_its_own_work(data: st.DataObject) -> None:
    """Whatever the order: neither what a rank computes, nor what the links carry."""
    work, fabric = data.draw(works()), data.draw(fabrics())
    cluster, before_s = Cluster(work, fabric), 0.0
    sent: list[Job | Gather] = [*work.jobs, *work.gathers]
    for weather in data.draw(weathers(fabric.ranks)):
        ended_s = cluster.iterate(weather)
        assert sorted(cluster.order) == list(range(len(work.jobs)))
        carried_s = weather.links * sum(fabric.occupied_s(one.nbytes, one.share) for one in sent)
        assert ended_s - before_s >= carried_s - 1e-9
        before_s = ended_s


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
