"""What threads get of the cores of a rank."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytesched.link.fabric import Cores, Fabric

CORES = st.floats(0.05, 64.0)
LOADS = st.floats(0.0, 16.0)


@pytest.mark.parametrize(
    ("cores", "others", "expected"),
    [
        (2.0, 0.0, 2.0),
        (2.0, 0.5, 1.5),
        # Two that want a whole core each share one, and half of one, in equal parts.
        (1.0, 1.0, 0.5),
        (0.5, 1.0, 0.25),
        (0.5, 0.1, 0.4),
        # One thread beside seven.
        (4.0, 7.0, 0.5),
        (math.inf, 100.0, math.inf),
    ],
)
def test_what_the_others_leave_or_a_fair_share(
    cores: float, others: float, expected: float
) -> None:
    assert Cores(cores).left(others) == pytest.approx(expected)


def test_work_is_stretched_by_what_it_lacks() -> None:
    assert Cores(0.5).stretch(1.0) == 2.0
    assert Cores(0.5).stretch(0.25) == 1.0
    assert Cores(1.0).stretch(1.0, 1.0) == 2.0
    assert Cores().stretch(1.0, 5.0) == 1.0


@given(CORES, CORES, LOADS, LOADS)
def test_with_fewer_cores_nothing_is_faster(
    one: float, other: float, wanted: float, others: float
) -> None:
    fewer, more = sorted((one, other))
    assert Cores(fewer).left(others) <= Cores(more).left(others)
    assert Cores(fewer).stretch(wanted, others) >= Cores(more).stretch(wanted, others) >= 1.0


@given(CORES, LOADS)
def test_no_more_is_handed_out_than_there_is(cores: float, others: float) -> None:
    assert 0 < Cores(cores).left(others) <= cores


@pytest.mark.parametrize("cores", [0.0, -1.0, math.nan])
def test_no_rank_is_without_a_core(cores: float) -> None:
    with pytest.raises(ValueError, match="a part of one"):
        Cores(cores)


def test_a_collective_waits_for_cores() -> None:
    """Ring of two: 2 messages and 2 more, 1 ms each, on half a core: 4 ms longer, half hidden."""
    links = {"ranks": 2, "bytes_per_s": 1e8, "latency_s": 1e-3, "message_cpu_s": 1e-3}
    enough, half = Fabric(**links), Fabric(**links, cores=0.5)  # type: ignore[arg-type]
    assert enough.occupied_s(10**6) == 10e-3
    assert half.occupied_s(10**6) == pytest.approx(12e-3)
    assert half.start_up_s(10**6) - enough.start_up_s(10**6) == pytest.approx(4e-3)
    # What the cores need for all bytes is the least that it takes: 4 + 10 ms on half a core.
    busy = Fabric(**links, byte_cpu_s=10e-9, cores=0.5)  # type: ignore[arg-type]
    assert busy.occupied_s(10**6) == pytest.approx(28e-3)
    assert busy.cpu_s(10**6) == pytest.approx(14e-3)
