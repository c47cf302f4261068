"""Whether sums go in two levels: by the setting, the hosts, and what is faster on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
from connected import part_of
from fake_gloo import FakeGloo, fake_group
from together import together
from torch._C._distributed_c10d import HashStore

from bytesched.errors import PluginError
from bytesched.plugins.routes import levels as module
from bytesched.plugins.routes.group import Group
from bytesched.plugins.routes.levels import TwoLevelSums, open_levels

EVEN = ["a", "a", "b", "b"]


def unused(name: str, ranks: Sequence[int]) -> Group:
    raise AssertionError("no group is to be opened")


def on_hosts(hosts: Sequence[str]) -> Group:
    group = fake_group(FakeGloo(size=len(hosts)))
    group.hosts = hosts
    return group


@pytest.mark.parametrize(
    ("hosts", "hierarchies"),
    [
        (EVEN, ["off"]),
        *((hosts, ["off", "auto", "on"]) for hosts in (["a", "a"], ["a", "b"])),
        (["a", "a", "b"], ["off", "auto"]),
        (["a"], ["off", "auto"]),
    ],
    ids=str,
)
def test_without_levels_sums_stay_flat(
    hosts: list[str], hierarchies: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Where they were asked for, that is said."""
    caplog.set_level(logging.INFO, "bytesched")
    for hierarchy in hierarchies:
        assert open_levels(hierarchy, on_hosts(hosts), unused) is None
    assert ("sums stay flat" in caplog.text) is ("on" in hierarchies)


def test_what_was_asked_for_and_cannot_be_had_is_an_error() -> None:
    with pytest.raises(PluginError, match=r"\{'a': 2, 'b': 1\}"):
        open_levels("on", on_hosts(["a", "a", "b"]), unused)


def opened(hierarchy: str, hosts: Sequence[str] = EVEN) -> list[TwoLevelSums | None]:
    """What every rank has, over Gloo; closed again."""
    store = HashStore()

    def on(rank: int) -> tuple[Group, TwoLevelSums | None]:
        data = part_of(store, rank, "data", range(len(hosts)))
        data.hosts = hosts
        return data, open_levels(
            hierarchy, data, lambda name, ranks: part_of(store, rank, name, ranks)
        )

    found = together(on, len(hosts))

    def close(rank: int) -> None:
        data, sums = found[rank]
        for group in (data, *(sums.groups if sums is not None else ())):
            group.close()

    together(close, len(hosts))
    return [sums for _, sums in found]


@pytest.mark.parametrize("hosts", [EVEN, ["a", "b", "a", "b"]], ids=str)
def test_ranks_meet_those_of_their_host_and_of_their_place(hosts: list[str]) -> None:
    names = [tuple(group.name for group in sums.groups) for sums in opened("on", hosts) if sums]
    for rank, host in enumerate(hosts):
        number, place = "ab".index(host), hosts[:rank].count(host)
        assert names[rank] == (f"gathering{number}", f"between{place}", f"spreading{number}")


@pytest.mark.parametrize(("flat_s", "levels_s"), [(2.0, 1.0), (1.0, 2.0), (1.0, 1.0)])
def test_left_to_itself_it_takes_what_is_faster(
    monkeypatch: pytest.MonkeyPatch, flat_s: float, levels_s: float
) -> None:
    monkeypatch.setattr(module, "_seconds", lambda *_: (flat_s, levels_s))
    assert [sums is not None for sums in opened("auto")] == [levels_s < flat_s] * 4


def test_ranks_measure_for_themselves_and_decide_by_the_slowest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_NBYTES", 1 << 10)
    seen: list[tuple[float, float]] = []
    seconds = module._seconds

    def spy(data: Group, sums: TwoLevelSums) -> tuple[float, float]:
        seen.append(seconds(data, sums))
        return seen[-1]

    monkeypatch.setattr(module, "_seconds", spy)
    opened("auto")
    assert len(seen) == 4
    assert len(set(seen)) == 1
    assert min(seen[0]) > 0
