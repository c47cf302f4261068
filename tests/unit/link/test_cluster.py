"""Clusters in virtual time: what is known in closed form."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import fabrics, works

from bytesched.link.cluster import Bundle, Cluster, Job, Work
from bytesched.link.fabric import Fabric


def two_layers() -> Work:
    return Work(
        forward_s=(1.0, 1.0),
        backward_s=(2.0, 2.0),
        jobs=(Job(300, 1, 1), Job(100, 0, 0)),
        bundles=(Bundle((1,), 0.0), Bundle((0,), 0.0)),
        bundle_of=(0, 1),
        is_planned=True,
    )


def three_layers() -> Work:
    """While the last layer is on the link, the others become ready."""
    return Work(
        forward_s=(0.1, 0.1, 0.1),
        backward_s=(1.0, 1.0, 1.0),
        jobs=tuple(Job(500, layer, layer) for layer in (2, 1, 0)),
        bundles=tuple(Bundle((2 - layer,), 0.0) for layer in range(3)),
        bundle_of=(0, 1, 2),
        is_planned=True,
    )


def test_an_iteration_by_hand() -> None:
    """Backward 4 s; layer 1 is on the link from 2 s to 5 s, layer 0 from 5 s to 6 s."""
    fabric = Fabric(ranks=2, bytes_per_s=100.0, latency_s=0.0)
    assert Cluster(two_layers(), fabric).iterate() == 6.0 + 1.0 + 1.0


@pytest.mark.parametrize(
    ("credit_bytes", "planned"),
    [
        # Decided when the link is free: what the front needs goes next.
        (1, [0, 2, 1]),
        # A chunk ahead: another one has been started by then.
        (501, [0, 1, 2]),
    ],
)
def test_an_order_is_planned_of_what_was_measured(credit_bytes: int, planned: list[int]) -> None:
    work = replace(three_layers(), credit_bytes=credit_bytes)
    cluster = Cluster(work, Fabric(ranks=2, bytes_per_s=100.0, latency_s=0.0))
    orders = []
    for _ in range(4):
        orders.append(list(cluster.order))
        cluster.iterate()
    assert orders == [[0, 1, 2]] * 2 + [planned] * 2


def test_what_keeps_to_fifo_plans_nothing() -> None:
    work = replace(three_layers(), policy="fifo")
    cluster = Cluster(work, Fabric(ranks=2, bytes_per_s=100.0, latency_s=0.0, overlaps=False))
    for _ in range(4):
        cluster.iterate()
    assert list(cluster.order) == [0, 1, 2]


def test_a_plan_that_turns_out_slower_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured in iterations 1, 5 and 13; the worst order there is takes the place of a plan."""
    monkeypatch.setattr("bytesched.ahead.plan_order", lambda *_, **__: [2, 1, 0])
    cluster = Cluster(three_layers(), Fabric(ranks=2, bytes_per_s=500.0, latency_s=0.0))
    for _ in range(13):
        cluster.iterate()
    assert list(cluster.order) == [2, 1, 0]
    cluster.iterate()
    assert list(cluster.order) == [0, 1, 2]


@settings(max_examples=40)
@given(st.data())
def test_no_iteration_beats_its_own_work(data: st.DataObject) -> None:
    """Whatever the order: neither what a rank computes, nor what the links carry."""
    work, fabric = data.draw(works()), data.draw(fabrics())
    cluster, before_s = Cluster(work, fabric), 0.0
    for _ in range(9):
        ended_s = cluster.iterate()
        assert sorted(cluster.order) == list(range(len(work.jobs)))
        carried_s = sum(fabric.occupied_s(job.nbytes) for job in work.jobs)
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
